"""Two artifacts of one stage, part by part: equal bit for bit, or how far apart."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

MACHINE = ("tokens_per_second", "peak_memory_gib", "model_flops_utilization")
"""Numbers in summaries that depend on the machine and its load."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One column, tensor, file or number of both."""

    place: str
    equal: bool
    """Bit for bit."""
    max_difference: float | None = None
    """Largest absolute one, where both are numbers of the same shape."""
    note: str = ""


def compare_artifacts(
    old: Mapping[str, pa.Buffer],
    new: Mapping[str, pa.Buffer],
    old_summary: Mapping[str, Any],
    new_summary: Mapping[str, Any],
) -> list[Comparison]:
    """Of two artifacts: their files by name, and their summaries without ``MACHINE``."""
    found: list[Comparison] = []
    tables = _tables(old) | _tables(new)
    for name in sorted((old.keys() | new.keys()) - tables):
        found += _file(name, old.get(name), new.get(name))
    if tables:
        found += _columns(_table(old), _table(new))
    names = sorted((old_summary.keys() | new_summary.keys()) - set(MACHINE))
    return found + [_value(f"summary/{name}", old_summary.get(name), new_summary.get(name)) for name in names]


def _tables(files: Mapping[str, pa.Buffer]) -> set[str]:
    return {name for name in files if name.endswith(".arrow")}


def _table(files: Mapping[str, pa.Buffer]) -> pa.Table | None:
    names = sorted(_tables(files))
    return pa.concat_tables([pa.ipc.open_file(files[name]).read_all() for name in names]) if names else None


def _columns(old: pa.Table | None, new: pa.Table | None) -> Iterator[Comparison]:
    if old is None or new is None:
        yield Comparison(place="table", equal=False, note=f"is {'new' if old is None else 'gone'}")
        return
    if old.num_rows != new.num_rows:
        yield Comparison(place="table", equal=False, note=f"{old.num_rows} rows -> {new.num_rows}")
        return
    for name in [*old.column_names, *(each for each in new.column_names if each not in old.column_names)]:
        if name not in old.column_names or name not in new.column_names:
            yield Comparison(place=name, equal=False, note=f"is {'new' if name in new.column_names else 'gone'}")
        elif old.schema.field(name).type != new.schema.field(name).type:
            kinds = f"{old.schema.field(name).type} -> {new.schema.field(name).type}"
            yield Comparison(place=name, equal=False, note=kinds)
        else:
            yield _column(name, old.column(name).combine_chunks(), new.column(name).combine_chunks())


def _column(name: str, old: Any, new: Any) -> Comparison:
    """Both of the same type and length."""
    kind = old.type
    if pa.types.is_map(kind) or pa.types.is_list(kind):
        rows = _lengths(old) != _lengths(new)
        if rows.any():
            return Comparison(place=name, equal=False, note=f"{int(rows.sum())} of {len(old)} rows have other lengths")
        if not pa.types.is_map(kind):
            return _column(name, old.flatten(), new.flatten())
        if not _used(old, old.keys).equals(_used(new, new.keys)):
            return Comparison(place=name, equal=False, note="other names")
        return _column(name, _used(old, old.items), _used(new, new.items))
    if old.null_count != new.null_count or not old.is_null().equals(new.is_null()):
        return Comparison(place=name, equal=False, note=f"{old.null_count} nulls -> {new.null_count}")
    if pa.types.is_floating(kind) or pa.types.is_integer(kind):
        return _numbers(name, *(each.drop_null().to_numpy(zero_copy_only=False) for each in (old, new)))
    rows = np.array([a != b for a, b in zip(old.to_pylist(), new.to_pylist(), strict=True)], dtype=bool)
    note = f"{int(rows.sum())} of {len(rows)} differ" if rows.any() else ""
    return Comparison(place=name, equal=not rows.any(), note=note)


def _lengths(column: Any) -> np.ndarray:
    return np.diff(np.asarray(column.offsets))


def _used(column: Any, values: Any) -> Any:
    """Of a map's keys or items those that its rows refer to."""
    first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
    return values.slice(first, last - first)


def _numbers(place: str, old: np.ndarray, new: np.ndarray) -> Comparison:
    """Of the same shape and type; NaNs of the same bits are equal."""
    if old.tobytes() == new.tobytes():
        return Comparison(place=place, equal=True, max_difference=0.0)
    with np.errstate(invalid="ignore"):
        apart = np.abs(old.astype(np.float64) - new.astype(np.float64))
    apart[(old == new) | (np.isnan(old.astype(np.float64)) & np.isnan(new.astype(np.float64)))] = 0.0
    changed = int((old.reshape(-1) != new.reshape(-1)).sum())
    worst = float(apart.max())
    note = f"{changed} of {old.size} differ" + ("" if np.isfinite(worst) else ", some infinite or NaN in one only")
    return Comparison(place=place, equal=False, max_difference=worst if np.isfinite(worst) else None, note=note)


def _file(name: str, old: pa.Buffer | None, new: pa.Buffer | None) -> list[Comparison]:
    if old is None or new is None:
        return [Comparison(place=name, equal=False, note=f"is {'new' if old is None else 'gone'}")]
    if old.equals(new):
        return [Comparison(place=name, equal=True)]
    if name.endswith(".safetensors"):
        return _tensors(name, old, new)
    return [Comparison(place=name, equal=False, note=f"{old.size} bytes -> {new.size}, or other ones")]


def _tensors(name: str, old: pa.Buffer, new: pa.Buffer) -> list[Comparison]:
    """The tensors that differ."""
    from safetensors.torch import load

    before, after = load(old.to_pybytes()), load(new.to_pybytes())
    found = []
    for each in sorted(before.keys() | after.keys()):
        place, a, b = f"{name}/{each}", before.get(each), after.get(each)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            found.append(Comparison(place=place, equal=False, note="another shape or precision, or in one only"))
            continue
        compared = _numbers(place, a.float().numpy(), b.float().numpy())
        if not compared.equal:
            found.append(compared)
    return found or [Comparison(place=name, equal=False, note="the same tensors in other bytes")]


def _value(place: str, old: Any, new: Any) -> Comparison:
    if old == new:
        return Comparison(place=place, equal=True)
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (old, new))
    return Comparison(
        place=place, equal=False, max_difference=abs(old - new) if numbers else None, note=f"{old!r} -> {new!r}"
    )
