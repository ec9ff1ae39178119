"""From measurements to the rows of the table: the bounds, and what was measured.

``ROWS`` has the groups by the names that the command takes. Each says which measurements it needs; the rows of those
that are there are worked out by pure functions of their times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ngplus.lab.bench.record import Measurement
from ngplus.lab.bench.state import curvature_bytes
from ngplus.lab.bench.timing import Array, Spread, Times, amortised, exponents

MICRO_BATCHES = 8  # of 32 images: a batch of 256 by accumulation
T_SHORT, T_LONG, T_NGADAM = 20, 500, 5
MEGA = 10**6


@dataclass(frozen=True)
class Row:
    """``values`` are [rounds, 2], by wall and CPU time, or [rounds, 1] where it is no matter of time. ``asked`` is the
    most that it may be; with ``within_noise`` the lower quartile counts, else the median. What quick models give is no
    answer to what was asked."""

    group: str
    what: str
    values: Array
    asked: float | None = None
    unit: str = "ratio"
    note: str = ""
    within_noise: bool = False
    of: str = ""  # the measurement
    quick: bool = False

    @property
    def spread(self) -> Spread:
        return Spread.of(self.values[:, 0])

    @property
    def cpu(self) -> float | None:
        return float(np.median(self.values[:, 1])) if self.values.shape[1] > 1 else None

    @property
    def reached(self) -> bool | None:
        if self.asked is None or self.quick:
            return None
        return (self.spread.low if self.within_noise else self.spread.median) <= self.asked

    def as_dict(self, measurement: Measurement) -> dict[str, Any]:
        spread = self.spread
        return {
            "row": self.group,
            "what": self.what,
            "unit": self.unit,
            "asked": self.asked,
            "measured": spread.median,
            "quartiles": [spread.low, spread.high],
            "cpu": self.cpu,
            "reached": self.reached,
            "note": self.note,
            "measurement": self.of,
            "when": measurement.when,
            "repeats": measurement.repeats,
            "quick": measurement.quick,
            "threads": measurement.environment.get("threads"),
        }


Maker = Callable[[str, Measurement], list[Row]]  # from the name of a measurement and what it gave


@dataclass(frozen=True)
class Group:
    title: str
    makers: Mapping[str, Maker]  # by the measurement needed


def rows_of(measurements: Mapping[str, Measurement], groups: list[str] | None = None) -> list[Row]:
    """The rows of these groups, or of all, for which there are measurements."""
    found: list[Row] = []
    for name in groups or list(ROWS):
        for needed, maker in ROWS[name].makers.items():
            if needed in measurements:
                one = measurements[needed]
                found += [replace(row, group=name, of=needed, quick=one.quick) for row in maker(needed, one)]
    return found


# ------------------------------------------------------------------------------------------------ training steps


def training_step(times: Times, name: str, every: int, passes: int = 1) -> Array:
    """The mean cost of a training step of ``passes`` micro-batches with a refresh every T steps."""
    plain = passes * times[f"{name}.plain.pass"] + times[f"{name}.plain.step"]
    refresh = passes * times[f"{name}.refresh.pass"] + times[f"{name}.refresh.step"]
    return amortised(plain, refresh, every)


def added_cost(times: Times, name: str, base: str, every: int, passes: int = 1) -> Array:
    """A training step over that of ``base``, with the base's pass in place of the method's own without a refresh, which
    is the same work: the noise of two long passes is then not in it."""
    own, other = training_step(times, name, every, passes), passes * times[f"{base}.pass"] + times[f"{base}.step"]
    same: Array = (own + passes * (times[f"{base}.pass"] - times[f"{name}.plain.pass"])) / other
    return same


def _against(times: Times, base: str, every: int, passes: int, asked: float | None, what: str) -> Row:
    other = passes * times[f"{base}.pass"] + times[f"{base}.step"]
    name = "ngadam" if base == "adamw" else "ngplus"
    same = Spread.of(added_cost(times, name, base, every, passes)[:, 0])
    note = f"{same.median:.4f} with the pass of {base} for both"
    return Row("", what, training_step(times, name, every, passes) / other, asked, note=note)


def step(name: str, one: Measurement) -> list[Row]:
    what = f"training step against SGD with momentum, T = {T_SHORT}: {one.numbers['problem']}"
    return [_against(one.times, "sgd", T_SHORT, 1, 1.06, what)]


def step_large(name: str, one: Measurement) -> list[Row]:
    what = f"the same, {MICRO_BATCHES} such batches accumulated, T = {T_LONG}, from measured parts"
    return [_against(one.times, "sgd", T_LONG, MICRO_BATCHES, 1.01, what)]


BUILD = {"resnet": 0.10, "transformer": 0.25, "mlp": 0.25}


def build(name: str, one: Measurement) -> list[Row]:
    """What a refresh adds to a pass, against the pass without it."""
    found = []
    for method, label in (("ngplus", ""), ("dense", ", solver dense"), ("quarter", ", samples=0.25")):
        if f"{method}.plain.pass" in one.times:
            plain, refresh = one.times[f"{method}.plain.pass"], one.times[f"{method}.refresh.pass"]
            what = f"building all L or R against a forward and backward{label}: {one.numbers['problem']}"
            found.append(Row("", what, refresh / plain - 1, BUILD[name] if method == "ngplus" else None))
    return found


def inverses(name: str, one: Measurement) -> list[Row]:
    """What a refresh adds to the step, against a pass."""
    t = one.times
    extra = (t["ngplus.refresh.step"] - t["ngplus.plain.step"]) / t["sgd.pass"]
    return [Row("", f"all inverses against a forward and backward: {one.numbers['problem']}", extra, 0.03)]


NGADAM = {"ngadam": 1.04, "ngadam-transformer": 1.10, "ngadam-mlp": 1.40}
INTERVALS = (T_NGADAM, 1, 20)  # of NGAdam's refreshes; the first is the default


def ngadam(name: str, one: Measurement) -> list[Row]:
    t, problem = one.times, one.numbers["problem"]
    what = "NGAdam: training step against AdamW, T = {}: " + problem
    steps = [_against(t, "adamw", T, 1, NGADAM[name] if T == T_NGADAM else None, what.format(T)) for T in INTERVALS]
    roots = (t["ngadam.refresh.step"] - t["ngadam.plain.step"]) / t["adamw.pass"]
    return [*steps, Row("", f"NGAdam: all roots against a forward and backward: {problem}", roots, 0.15)]


def capture(name: str, one: Measurement) -> list[Row]:
    """The pass without a refresh where the capture is installed, against a model that has none."""
    null = Spread.of((one.times["again.pass"] / one.times["sgd.pass"])[:, 0])
    note = f"two equal models without capture: {null.median:.3f} ({null.low:.3f} to {null.high:.3f})"
    ratio = one.times["ngplus.plain.pass"] / one.times["sgd.pass"]
    what = f"forward and backward with the capture installed, no refresh: {one.numbers['problem']}"
    return [Row("", what, ratio, 1.0, note=note, within_noise=True)]


def bare(name: str, one: Measurement) -> list[Row]:
    t = one.times
    kinds = sorted(("foreach", "fused"), key=lambda kind: float(np.median(t[kind][:, 0])))
    ratios = [t["ngplus.step"] / (t["gemm"] + t[kind]) for kind in kinds]
    note = f"{Spread.of(ratios[1][:, 0]).median:.3f} with {kinds[1]} SGD; step {_ms(t['ngplus.step'])}, "
    note += f"GEMMs {_ms(t['gemm'])}, SGD {_ms(t[kinds[0]])}"
    return [
        Row("", f"step without refresh against its bare GEMMs and torch's {kinds[0]} SGD", ratios[0], 1.15, note=note)
    ]


# ------------------------------------------------------------------------------------------------ memory


def memory(name: str, one: Measurement) -> list[Row]:
    peaks = {key: np.array(values, dtype=float)[:, None] for key, values in one.numbers["peaks"].items()}
    shown = ", ".join(f"{key} {np.median(x) / MEGA:,.0f} MB" for key, x in peaks.items())
    what = "peak memory of a process with a refresh step against one with plain steps"
    return [
        Row("", what, peaks["refresh"] / peaks["plain"], 1.15, note=shown),
        Row("", f"{what}, NGAdam", peaks["ngadam-refresh"] / peaks["ngadam-plain"]),
        Row("", "peak memory of a process with plain steps against SGD's", peaks["plain"] / peaks["sgd"]),
    ]


STATE_ASKED = {"sample": 0.30, "momentum": 0.55}
STATE_TITLES = {
    "sample": "NGPlus, sample", "momentum": "NGPlus, momentum", "ngadam": "NGAdam",
    "sgd": "SGD with momentum", "adamw": "AdamW", "kfac": "KFAC, moving average", "kfac-sample": "KFAC, inverses only",
    "shampoo": "Shampoo", "soap": "SOAP",
}  # fmt: skip


def state(name: str, one: Measurement) -> list[Row]:
    found = []
    for method, sizes in one.numbers["states"].items():
        ratio = np.array([[curvature_bytes(sizes) / one.numbers["gradients"]]])
        total = sum(sizes.values()) / one.numbers["gradients"]
        what = f"curvature / gradient bytes: {STATE_TITLES[method]}"
        found.append(Row("", what, ratio, STATE_ASKED.get(method), note=f"{total:.2f} with momentum or Adam's moments"))
    return found


def embedding(name: str, one: Measurement) -> list[Row]:
    t, peaks, found = one.times, one.numbers["peaks"], []
    size = f"{one.numbers['rows']:,} x {one.numbers['width']}, {one.numbers['touched']:,} rows touched"
    extra = {key: (p["peak"] - peaks["sgd"]["peak"]) / MEGA for key, p in peaks.items()}
    for method, label, asked in (("ngplus", "", True), ("ngadam", ", NGAdam", False)):
        whole = training_step(t, method, T_SHORT) / (t["sgd.pass"] + t["sgd.step"])
        note = f"{np.median(whole[:, 0]):.2f} of a training step with T = {T_SHORT}"
        what = f"sparse embedding {size}: step against torch's sparse SGD{label}"
        found.append(Row("", what, t[f"{method}.plain.step"] / t["sgd.step"], 3.0 if asked else None, note=note))
        what = f"the same: peak memory beyond SGD's{label}"
        found.append(Row("", what, np.array([[extra[method]]]), 50.0 if asked else None, "MB"))
    return found


# ------------------------------------------------------------------------------------------------ growth, import


def growth(name: str, one: Measurement) -> list[Row]:
    rows = [int(m) for m in one.numbers["rows"]]
    base = f"exponent in the number of rows, {rows[0]:,} to {rows[-1]:,}, block_size {one.numbers['block_size']}"
    plain = exponents(rows, [one.times[f"{m}.plain.step"] for m in rows])
    refresh = exponents(rows, [one.times[f"{m}.refresh.pass"] + one.times[f"{m}.refresh.step"] for m in rows])
    return [
        Row("", f"{base}: step without refresh", plain, 1.1, "exponent"),
        Row("", f"{base}: pass and step with refresh", refresh, 1.1, "exponent"),
    ]


def imports(name: str, one: Measurement) -> list[Row]:
    return [Row("", "import ngplus against import torch", one.times["ngplus"] / one.times["torch"], 1.05)]


# ------------------------------------------------------------------------------------------------ rivals

RIVALS = {
    "adamw": "AdamW", "muon": "Muon", "shampoo": "Shampoo", "soap": "SOAP", "kfac": "KFAC",
    "ngplus": "NGPlus", "ngadam": "NGAdam",
}  # fmt: skip


def rival_steps(times: Times, every: int = T_SHORT) -> dict[str, Array]:
    """Each method's training step against SGD's, all with the base's pass; a capture adds what it adds to its own."""
    found = {}
    sgd = times["base.pass"] + times["sgd.step"]
    for name in RIVALS:
        if f"{name}.step" in times:
            found[name] = (times["base.pass"] + times[f"{name}.step"]) / sgd
        else:
            own = T_NGADAM if name == "ngadam" else every
            cost = amortised(times[f"{name}.plain.step"], times[f"{name}.refresh.step"], own)
            if f"{name}.plain.pass" in times:
                cost = cost + (times[f"{name}.refresh.pass"] - times[f"{name}.plain.pass"]) / own
            found[name] = (times["base.pass"] + cost) / sgd
    return found


def rivals(name: str, one: Measurement) -> list[Row]:
    """Of the MLP 2,048 wide, SOAP and Shampoo, which leave sides above 512 alone, precondition next to nothing."""
    found = []
    for method, ratio in rival_steps(one.times).items():
        t = one.times
        state = sum(one.numbers["states"][method].values()) / one.numbers["gradients"]
        parts = (
            [t[f"{method}.step"]] if f"{method}.step" in t else [t[f"{method}.{k}.step"] for k in ("plain", "refresh")]
        )
        note = f"step {' / '.join(_ms(x) for x in parts)}, state {state:.2f} of the gradient"
        every = T_NGADAM if method == "ngadam" else T_SHORT
        what = f"{RIVALS[method]}: training step against SGD, T = {every}: {one.numbers['problem']}"
        found.append(Row("", what, ratio, note=note))
    return found


def _ms(times: Array) -> str:
    return f"{1000 * float(np.median(times[:, 0])):,.1f} ms"


_PASSES = ("resnet", "transformer", "mlp")

ROWS: dict[str, Group] = {
    "step": Group("ResNet-50, batch 32, T = 20: training step against SGD", {"resnet": step}),
    "step-256": Group("the same for batch 256 and T = 500", {"resnet": step_large}),
    "build": Group("building all L or R against a forward and backward", dict.fromkeys(_PASSES, build)),
    "inverses": Group("all inverses of ResNet-50 against a forward and backward", {"resnet": inverses}),
    "ngadam": Group("NGAdam against AdamW; its roots", dict.fromkeys(NGADAM, ngadam)),
    "bare": Group("a step without refresh against its bare GEMMs and SGD", {"bare": bare}),
    "capture": Group("a pass without refresh, capture installed or not", dict.fromkeys(_PASSES, capture)),
    "memory": Group("peak memory with a refresh and without", {"memory": memory}),
    "state": Group("bytes of state against bytes of gradients", {"state": state}),
    "embedding": Group("a sparse embedding of 10,000,000 rows against SGD", {"embedding": embedding}),
    "growth": Group("growth of a step's cost with the rows", {"growth": growth}),
    "import": Group("import ngplus against import torch", {"import": imports}),
    "rivals": Group("SGD, AdamW, Muon, Shampoo, SOAP, KFAC", {f"rivals-{name}": rivals for name in _PASSES}),
}
