"""Several devices for one run: which part of each array lies on which, and what they tell each other."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from tied_lm.checks import ConfigError

T = TypeVar("T")

DATA, VOCAB = "data", "vocab"  # axes of a mesh: tokens are shared out over the first, rows over the other


def make_mesh(data: int, vocab: int) -> Mesh | None:
    """The mesh of `data` times `vocab` devices; None for one device alone.

    Args:
        data, vocab: 0 in one of them stands for as many as the other leaves.

    Raises:
        ConfigError: there are not so many; or there are more, in several processes, each of which has to take part.
    """
    present = jax.device_count()
    if not (data or vocab):
        raise ConfigError("mesh.vocab", 0, "at least 1 with mesh.data = 0")
    if max(data, 1) * max(vocab, 1) > present:
        field, size = ("data", data) if data > vocab else ("vocab", vocab)
        allowed = f"a mesh.data and a mesh.vocab whose product is at most the number of devices there are, {present}"
        raise ConfigError(f"mesh.{field}", size, allowed)
    data, vocab = data or present // vocab, vocab or present // data
    if jax.process_count() > 1 and data * vocab != present:
        allowed = f"a mesh.data that takes all {present} devices of the {jax.process_count()} processes; 0 does"
        raise ConfigError("mesh.data", data, allowed)
    if data * vocab == 1:
        return None
    axes = (AxisType.Auto,) * 2
    return jax.make_mesh((data, vocab), (DATA, VOCAB), axis_types=axes, devices=jax.devices()[: data * vocab])


def _along_largest(shape: tuple[int, ...], parts: int) -> PartitionSpec:
    """An array shared out along the largest of the axes that so many devices divide; whole where there is none."""
    axes = [axis for axis, size in enumerate(shape) if size % parts == 0]
    return PartitionSpec(*[None] * max(axes, key=lambda axis: shape[axis]), DATA) if axes else PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Layout:
    """How V rows and the tokens of a batch lie on the devices; by default all on one.

    Arrays of rows have P of them, the next number above V that the axis divides. The methods that are given what one
    device has are for use inside `shard_map`; where there is no mesh, they do nothing.
    """

    mesh: Mesh | None = None
    vocab_size: int = 0  # V; not asked for where there is no mesh

    @property
    def rows(self) -> int:
        """P, V and the padding."""
        parts = 1 if self.mesh is None else self.mesh.shape[VOCAB]
        return -(-self.vocab_size // parts) * parts

    def _shares(self, axis: str) -> bool:
        """Whether there is more than one device along an axis."""
        return self.mesh is not None and self.mesh.shape[axis] > 1

    def padded(self, rows_Vx: Float[Array, "V ..."]) -> Float[Array, "P ..."]:
        """Rows, and zeros after them."""
        more = self.rows - self.vocab_size
        return jnp.pad(rows_Vx, [(0, more)] + [(0, 0)] * (rows_Vx.ndim - 1)) if more else rows_Vx

    def cut(self, tree: PyTree) -> PyTree:
        """Arrays of rows, without the padding."""
        return tree if self.rows == self.vocab_size else jax.tree.map(lambda x_Px: x_Px[: self.vocab_size], tree)

    def mean_of_rows(self, table_PxD: Float[Array, "P D"]) -> Float[Array, "D"]:
        """The mean of V rows; what follows them is 0."""
        return table_PxD.sum(axis=0) / self.vocab_size

    def only_real(self, table_PxD: Float[Array, "P D"]) -> Float[Array, "P D"]:
        """The table with 0 for padding."""
        if self.rows == self.vocab_size:
            return table_PxD
        return jnp.where((jnp.arange(self.rows) < self.vocab_size)[:, None], table_PxD, 0)

    def specs(self, state: PyTree, vocabulary: Sequence[str], body_in_parts: bool = False) -> PyTree:
        """What of each array of a training state is shared out over what: rows of the vocabulary matrices and of their
        moments over one axis, what a body carries of each sequence over the other. Each device has all else.

        Args:
            vocabulary: names of the parameters that have a row for each token.
            body_in_parts: share the body's parameters and their moments out over the axis of the tokens, too: each
                array along the largest of its own axes that can be divided.
        """

        def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
            names = {getattr(key, "name", getattr(key, "key", None)) for key in path}
            if "carry" in names:
                return PartitionSpec(DATA)
            if body_in_parts and self.mesh is not None and "body" in names:
                return _along_largest(leaf.shape, self.mesh.shape[DATA])
            is_of_rows = "body" not in names and not names.isdisjoint(vocabulary) and leaf.ndim == 2
            return PartitionSpec(VOCAB) if is_of_rows else PartitionSpec()

        return jax.tree_util.tree_map_with_path(spec, state)

    def kept(self, state: PyTree, specs: PyTree) -> PyTree:
        """The shapes of the arrays of a state without padding."""

        def shape(leaf: Array, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            is_of_rows = VOCAB in spec and self.mesh is not None
            return jax.ShapeDtypeStruct((self.vocab_size, *leaf.shape[1:]) if is_of_rows else leaf.shape, leaf.dtype)

        return jax.tree.map(shape, state, specs)

    def place(self, tree: PyTree, specs: PyTree) -> PyTree:
        """Arrays with their parts where they belong; inside of jit and outside of it."""
        mesh = self.mesh
        if mesh is None:
            return tree
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        leaves = jax.tree.leaves(tree)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return lax.with_sharding_constraint(tree, shardings)
        return jax.device_put(tree, shardings)

    def share_out(self, compute: Callable[..., T], takes: tuple[PartitionSpec, ...], gives: Any) -> Callable[..., T]:
        """A function of what one device has as one of the whole arrays.

        Args:
            takes, gives: which axes of arguments and results are shared out over what.
        """
        if self.mesh is None:
            return compute
        return jax.shard_map(compute, mesh=self.mesh, in_specs=takes, out_specs=gives, check_vma=False)

    def place_batch(self, batch: PyTree) -> PyTree:
        """A batch, whose arrays have the sequences first, shared out."""
        return self.place(batch, jax.tree.map(lambda _: PartitionSpec(DATA), batch))

    def replicate(self, tree: PyTree) -> PyTree:
        """Results of a program, whole on every device: so each process can fetch them."""
        return self.place(tree, jax.tree.map(lambda _: PartitionSpec(), tree))

    def own_sequences(self, count: int) -> slice:
        """Of the sequences of a batch, those that devices of this process have."""
        if self.mesh is None:
            return slice(0, count)
        sharding = NamedSharding(self.mesh, PartitionSpec(DATA))
        places = sharding.addressable_devices_indices_map((count,)).values()
        parts = [index[0].indices(count) for index in places if index is not None]
        return slice(min(start for start, _, _ in parts), max(stop for _, stop, _ in parts))

    def from_own(self, part: Shaped[np.ndarray, "..."], axis: int, count: int) -> Array:
        """What lies on the host of its own sequences, as an array of those of all processes, on the devices.

        Args:
            axis: that of the sequences.
            count: how many there are in all.
        """
        if self.mesh is None:
            return jnp.asarray(part)
        first, before = self.own_sequences(count).start, part.shape[:axis]
        sharding = NamedSharding(self.mesh, PartitionSpec(*[None] * axis, DATA))

        def of(index: tuple[slice, ...] | None) -> Shaped[np.ndarray, "..."]:
            start, stop, _ = (slice(None) if index is None else index[axis]).indices(count)
            return part[(slice(None),) * axis + (slice(start - first, stop - first),)]

        return jax.make_array_from_callback((*before, count, *part.shape[axis + 1 :]), sharding, of)

    def place_rows(self, tables: PyTree) -> PyTree:
        """Arrays of rows, shared out."""
        return self.place(tables, jax.tree.map(lambda _: PartitionSpec(VOCAB), tables))

    def largest_of_rows(self, x_C: Float[Array, "C"]) -> Float[Array, "C"]:
        """The largest value over the rows of all devices, from that over the rows of one."""
        return lax.pmax(x_C, VOCAB) if self._shares(VOCAB) else x_C

    def any_of_rows(self, x_C: Bool[Array, "C"]) -> Bool[Array, "C"]:
        """Whether it is so on any device that has rows."""
        return lax.pmax(x_C.astype(jnp.int32), VOCAB) > 0 if self._shares(VOCAB) else x_C

    def sum_of_rows(self, x: Float[Array, "*C"]) -> Float[Array, "*C"]:
        """The sum over the rows of all devices."""
        return lax.psum(x, VOCAB) if self._shares(VOCAB) else x

    def log_sum_of_rows(self, x_C: Float[Array, "C"]) -> Float[Array, "C"]:
        """The log-sum-exp over the rows of all devices, from that over the rows of one."""
        if not self._shares(VOCAB):
            return x_C
        largest_C = lax.pmax(x_C, VOCAB)
        return largest_C + jnp.log(lax.psum(jnp.exp(x_C - largest_C), VOCAB))

    def sum_of_tokens(self, x: Float[Array, "*V"]) -> Float[Array, "*V"]:
        """The sum over the tokens of all devices."""
        return lax.psum(x, DATA) if self._shares(DATA) else x

    def first_row(self, rows: int) -> int | Int[Array, ""]:
        """The id of the first of the rows that this device has."""
        return 0 if self.mesh is None else lax.axis_index(VOCAB) * rows

    def only_rows(self, logits_CxV: Float[Array, "C V"]) -> Float[Array, "C V"]:
        """Logits with minus infinity for padding."""
        if self.rows == self.vocab_size:
            return logits_CxV
        rows = logits_CxV.shape[1]
        return jnp.where(self.first_row(rows) + jnp.arange(rows) < self.vocab_size, logits_CxV, -jnp.inf)

    def own(self, ids_N: Int[Array, "N"], rows: int) -> Int[Array, "N"]:
        """Ids as indices of the rows that this device has; of others, and of padding, one that is out of range."""
        if self.mesh is None:
            return ids_N
        index_N = ids_N - self.first_row(rows)
        return jnp.where((index_N >= 0) & (index_N < rows) & (ids_N < self.vocab_size), index_N, rows)

    def rows_at(self, rows_VxD: Float[Array, "V D"], ids_N: Int[Array, "N"]) -> Float[Array, "N D"]:
        """The rows of some ids, NaN for an id of none, and 0 for one whose row is elsewhere: `sum_of_rows` has all."""
        if self.mesh is None:
            ids_N = jnp.where(ids_N < 0, rows_VxD.shape[0], ids_N)
            return jnp.take(rows_VxD, ids_N, axis=0, mode="fill", fill_value=jnp.nan)
        mine_NxD = jnp.take(rows_VxD, self.own(ids_N, rows_VxD.shape[0]), axis=0, mode="fill", fill_value=0)
        return jnp.where(((ids_N < 0) | (ids_N >= self.vocab_size))[:, None], jnp.nan, mine_NxD)


ONE_DEVICE = Layout()
