"""What an operation of a program does with a table: uses it, or hands it on in another form."""

from collections.abc import Sequence
from math import prod

from tied_lm.model.values import CUSTOM, Eqn, Value, flat_axes


def use_of(eqn: Eqn, values: Sequence[Value], tables: frozenset[int]) -> tuple[str | None, str]:
    """The kind of use that an equation makes of the table, None if it hands it on; and why it is unclear."""
    name = eqn.primitive.name
    others = [v for i, v in enumerate(values) if i not in tables]
    rows = values[min(tables)].rows
    activation, data = any(v.moves for v in others), any(v.kind == "data" for v in others)
    if name == "while":
        return "unclear", "a `while` has no reverse derivative"
    if name in CUSTOM and (activation or data):
        return "unclear", "a custom rule is not looked into"
    if name in ("gather", "dynamic_slice") and 0 in tables and all(v.kind == "literal" for v in others):
        return None, ""
    if name == "gather" and 0 in tables and rows:
        if _gathered(eqn) <= rows:
            return "lookup", ""
        return "unclear", "it gathers along another axis than the rows"
    if name == "dynamic_slice" and 0 in tables and rows and all(eqn.params["slice_sizes"][r] == 1 for r in rows):
        return "lookup", ""
    if name == "dot_general" and len(tables) == 1:
        (at,) = tables
        contract, batch = (pair[at] for pair in eqn.params["dimension_numbers"])
        other = values[1 - at]
        if rows and rows & set(contract):
            if other.one_hot is not None and {other.one_hot} == set(eqn.params["dimension_numbers"][0][1 - at]):
                return "lookup", ""
            if activation or data:
                return "unclear", "a product over the rows, of what is not provably one-hot"
        elif rows and not rows & set(batch) and (activation or data):
            return "scoring", ""
    if not activation and not (data and _spread(eqn, values, tables)):
        return None, ""
    if rows == frozenset():
        return "other", ""
    return "unclear", "the table meets an activation, and is neither gathered nor multiplied by it over the features"


def _gathered(eqn: Eqn) -> set[int]:
    """The axes along which a gather chooses. Along an axis that is taken whole there is no choice."""
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    return {a for a in eqn.params["dimension_numbers"].start_index_map if sizes[a] < shape[a]}


def _spread(eqn: Eqn, values: Sequence[Value], tables: frozenset[int]) -> bool:
    """Whether the table is repeated along an axis on which the data differ, as where scores are made by hand."""
    flat = flat_axes(eqn, values)
    repeated = frozenset[int]().union(*(flat[i] for i in tables))
    return eqn.primitive.name in ("mul", "div", "add", "sub") and any(
        repeated - flat[i]
        for i, v in enumerate(values)
        if i not in tables and v.kind == "data" and eqn.invars[i].aval.ndim
    )


def rows_after(eqn: Eqn, values: Sequence[Value], tables: frozenset[int]) -> list[frozenset[int] | None]:
    """The axes of the rows in what an equation makes of the table; None where they are lost."""
    name, params = eqn.primitive.name, eqn.params
    at = min(tables)
    rows, before = frozenset[int]().union(*(values[i].rows or () for i in tables)), eqn.invars[at].aval.shape
    after = [v.aval.shape for v in eqn.outvars]
    if name == "transpose":
        return [frozenset(new for new, old in enumerate(params["permutation"]) if old in rows)]
    if name == "broadcast_in_dim":
        return [frozenset(params["broadcast_dimensions"][r] for r in rows)]
    if name == "squeeze" or (name.startswith("reduce_") and "axes" in params):
        gone = {a % len(before) for a in params["dimensions" if name == "squeeze" else "axes"]}
        kept = [a for a in range(len(before)) if a not in gone]
        return [frozenset(new for new, old in enumerate(kept) if old in rows)] * len(after)
    if name == "reshape":
        return [_reshaped(before, after[0], rows)]
    if name == "all_gather":
        new = params["all_gather_dimension"]
        return [rows if params["tiled"] else frozenset(r + (r >= new) for r in rows)]
    if name == "dot_general" and len(tables) == 1 and at == 0:
        (contract, _), (batch, _) = params["dimension_numbers"]
        kept = [*batch, *(a for a in range(len(before)) if a not in (*contract, *batch))]
        return [None if rows & set(contract) else frozenset(new for new, old in enumerate(kept) if old in rows)]
    if name == "dot_general" and len(tables) == 1:
        (_, contract), (_, batch) = params["dimension_numbers"]
        kept = [a for a in range(len(before)) if a not in (*contract, *batch)]
        start = len(after[0]) - len(kept)
        return [None if rows & {*contract, *batch} else frozenset(start + kept.index(r) for r in rows)]
    if name == "slice" and any(after[0][r] == 1 < before[r] for r in rows):
        return [frozenset()]  # a row by its number
    if name in ("slice", "dynamic_slice", "pad", "concatenate") or all(shape == before for shape in after):
        return [rows if len(shape) == len(before) else None for shape in after]
    if name in CUSTOM:  # a table in, a table out; the others are taken for the other parameters that went in
        others = {v.aval.shape for i, v in enumerate(eqn.invars) if i not in tables}
        return [rows if shape == before else frozenset() if shape in others else None for shape in after]
    return [None if rows else frozenset()] * len(after)


def _reshaped(before: tuple[int, ...], after: tuple[int, ...], rows: frozenset[int]) -> frozenset[int] | None:
    """The axes that the rows have become, if they mix with no other."""
    new: set[int] = set()
    for r in rows:
        ahead, size, taken = prod(before[:r]), before[r], 1
        axes = [a for a in range(len(after)) if prod(after[:a]) >= ahead and prod(after[: a + 1]) <= ahead * size]
        for a in axes:
            taken *= after[a]
        if taken != size:
            return None
        new |= {a for a in axes if after[a] > 1}
    return frozenset(new)
