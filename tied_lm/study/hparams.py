"""The table of runs in TensorBoard: what was set, and what came out, averaged over the seeds of each group."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tensorboard.compat.proto.summary_pb2 import Summary as BoardSummary
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from tied_lm.checks import own_options
from tied_lm.config import Config, flatten, to_dict
from tied_lm.model.bodies import BODIES, Body
from tied_lm.model.embedding import VocabularyModel
from tied_lm.model.schemes import SCHEMES
from tied_lm.record.events import Summary, write_events
from tied_lm.study.meanruns import size_of

NAME = "hparams"  # of the files
METRICS = {
    "loss/eval": ("held-out loss", "nats a token, at the last step"),
    "loss/excess": ("excess", "held-out loss above the best possible one, nats a token"),
    "probe/split/share": ("share", "of the lookup in the gradient, over the probe; tied arms alone have one"),
    "size/parameters": ("parameters", "learned numbers of the model"),
}


class Session(NamedTuple):
    """A finished run."""

    folder: Path
    arm: str
    config: Config
    parameters: int
    point: str = ""  # of a sweep

    @property
    def group(self) -> str:
        """Runs of one group are averaged: those that differ in the seed alone."""
        return f"{self.arm} at {self.point}" if self.point else self.arm


def _is_read(field: str, config: Config) -> bool:
    """Whether the scheme or the body of a config takes an option; every other field is read by all."""
    group, _, name = field.partition(".")
    if group == "scheme":
        return name in own_options(SCHEMES[config.model.tying], VocabularyModel, config.scheme, group)
    kind = BODIES[config.model.body]
    return group != "body" or (kind is not None and name in own_options(kind, Body, config.body, group))


def _differing(sessions: Sequence[Session]) -> dict[str, list[Any]]:
    """The fields in which sessions differ beside the seed, with the value of each session; and the arm. None is that of
    a session that does not read the field."""
    flat = [flatten(to_dict(one.config)) for one in sessions]
    columns: dict[str, list[Any]] = {"arm": [one.arm for one in sessions]}
    for field in flat[0]:
        values = [one.get(field) for one in flat]
        if field != "seed" and len({json.dumps(value) for value in values}) > 1:
            columns[field] = [
                v if _is_read(field, one.config) else None for v, one in zip(values, sessions, strict=True)
            ]
    return {field: values for field, values in columns.items() if any(value is not None for value in values)}


def _is_number(values: Sequence[Any]) -> bool:
    known = [value for value in values if value is not None]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)


def _summary(tag: str, **data: Any) -> Summary:
    content = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**data))
    found = BoardSummary()
    found.value.add(tag=tag, metadata=content, tensor=metadata.NULL_TENSOR)
    return Summary.FromString(found.SerializeToString())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _info(name: str, values: Sequence[Any]) -> api_pb2.HParamInfo:
    """A column; of a text the table wants all that it may be."""
    if _is_number(values):
        return api_pb2.HParamInfo(name=name, type=api_pb2.DATA_TYPE_FLOAT64)
    info = api_pb2.HParamInfo(name=name, type=api_pb2.DATA_TYPE_STRING)
    info.domain_discrete.extend(sorted({_text(value) for value in values if value is not None}))
    return info


def _experiment(columns: Mapping[str, Sequence[Any]]) -> Summary:
    return _summary(
        metadata.EXPERIMENT_TAG,
        experiment=api_pb2.Experiment(
            hparam_infos=[_info(name, values) for name, values in columns.items()],
            metric_infos=[
                api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=name, description=about)
                for tag, (name, about) in METRICS.items()
            ],
        ),
    )


def write_sessions(places: Sequence[Path], sessions: Sequence[Session]) -> None:
    """Write down what each of some finished runs was, so that they can be compared in one table.

    Args:
        places: the folders that TensorBoard may be opened on: it takes the columns from any one of them.
    """
    if not sessions:
        return
    columns = _differing(sessions)
    for place in places:
        write_events(place, NAME, [(0, _experiment(columns))])
    for k, one in enumerate(sessions):
        start = plugin_data_pb2.SessionStartInfo(group_name=one.group, start_time_secs=time.time())
        for name, values in columns.items():
            if values[k] is None:
                continue
            if _is_number(values):
                start.hparams[name].number_value = values[k]
            else:
                start.hparams[name].string_value = _text(values[k])
        end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
        summaries = [
            _summary(metadata.SESSION_START_INFO_TAG, session_start_info=start),
            _summary(metadata.SESSION_END_INFO_TAG, session_end_info=end),
            Summary(value=[size_of(one.parameters)]),
        ]
        write_events(one.folder, NAME, [(0, found) for found in summaries])
