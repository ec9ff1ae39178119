"""The matrices W (m x n) of a model: which parameters form each, and which modules use it.

A tied weight is one matrix with several uses. A bias is a column of the matrix of its weight. Parameters of modules
without a rule get per-sample gradients by vmap, or mini-batch curvature.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ngplus.capture import reasons
from ngplus.capture.batch import check_bytes
from ngplus.capture.layers import LayerRule, Layout, MatrixSpec, UnknownModuleRule, rule_for
from ngplus.capture.layers.base import has_own_forward
from ngplus.capture.layers.layout import spec_of
from ngplus.fisher.blocks import BlockPartition
from ngplus.fisher.products import REFRESH_MEMORY
from ngplus.utils.memory import HeldStorages


class ParameterMatrix:
    """One matrix W (m x n) of the paper: its parameters, their layout, and the state of its capture.

    Args:
        names: of the parameters.
        params: the parameters, whose entries stand side by side as columns.
        kinds: the layout of each parameter, as in ``MatrixSpec``.
        groups: the number of matrices in it, for grouped convolutions.
        source: where the curvature comes from: "sample" (a rule's factors), "vmap", or "batch" (the gradient in .grad).
    """

    def __init__(
        self, names: list[str], params: list[nn.Parameter], kinds: list[str], groups: int = 1, source: str = "batch"
    ) -> None:
        self.names, self.params, self.kinds, self.groups, self.source = names, params, kinds, groups, source
        self.has_rule = source == "sample"
        self.lookup = ""  # rows are looked up by index: "only" so, or "also" (a tied output layer)
        self.sparse = False  # its gradients may be sparse
        self.own_forward = False  # a module that uses it has its own forward, so coverage is checked at each refresh
        self.armed = False  # a refresh is due at the next step, so hooks record
        self.checked = False  # the captured G_i were found to sum to the gradient
        self.seen: tuple[int, int] | None = None  # samples (of all ranks) and positions of the last refresh
        self.summed = False  # the positions were added already
        self.ranks = 1  # processes whose samples these are
        self.form: str | None = None  # the form of its product
        self.refresh_memory = REFRESH_MEMORY  # bytes that a refresh may take for it
        self.refresh_bytes = 0  # that the last refresh took
        self.held = HeldStorages()  # what waits for other uses, of this matrix and others
        self.missed = ""  # why the last refresh captured nothing, and used the mini-batch gradient
        self.double_backward = False  # a backward pass since the last step had create_graph=True
        self.not_captured = ""  # why nothing was captured since the last step; "" if its modules were not called
        self.reason = ""  # why the source is, or will be, "batch"
        self.estimate: Any = None  # L of this step's refresh, for NGPlus.curvature() until the next step
        self.fixed_partition: BlockPartition | None = None  # overrides the options of the parameter group
        # For sharded parameters (ngplus.distributed.sharded):
        self.managed: list[Any] = []  # FSDP2's record of each parameter: in the graph other tensors replace them
        self.adds_samples = True  # this rank counts the samples that it captures
        self.captured_jointly = False  # other ranks capture the same samples together with this one
        self._shapes: list[torch.Size] = []
        self.update_layout()

    @property
    def name(self) -> str:
        return self.names[0]

    def update_layout(self) -> bool:
        """Reads which parameters are trained, and their dtype and device. Returns True if that has changed.

        RuntimeError if a parameter that is trained has another shape than when the matrix was made.
        """
        active = tuple(p.requires_grad for p in self.params)
        for name, param, shape in zip(self.names, self.params, self._shapes, strict=False):
            if param.shape != shape and param.requires_grad:
                raise RuntimeError(
                    f"Parameter {name!r} had the shape {tuple(shape)} when the optimizer was created, and has "
                    f"{tuple(param.shape)} now, as after resize_token_embeddings(): create a new optimizer"
                )
        self._shapes += [param.shape for param in self.params[len(self._shapes) :]]
        current = (active, self.params[0].dtype, self.params[0].device)
        if current == getattr(self, "_current", None):
            return False
        self._current, self.active = current, active
        self._partitions: dict[tuple[str, int | None], BlockPartition] = {}
        self.parts = [i for i, trained in enumerate(active) if trained] or list(range(len(active)))
        self.active_params = [self.params[i] for i in self.parts]
        self.layout = Layout(
            [self.params[i].shape for i in self.parts], [self.kinds[i] for i in self.parts], self.groups
        )
        return True

    @property
    def refreshed_from(self) -> str:
        """Where the curvature in use comes from: "sample", "vmap" or "batch"."""
        return "batch" if self.missed else self.source

    @property
    def note(self) -> str:
        """Why that is "batch"."""
        return self.reason or self.missed

    @property
    def uncovered(self) -> str:
        """Why the captured G_i do not sum to the gradient."""
        return reasons.DOUBLE_BACKWARD if self.double_backward else reasons.OTHER_USES

    def fall_back(self, reason: str) -> None:
        """Uses the curvature of the mini-batch gradient from now on."""
        self.source, self.reason = "batch", reason

    def fall_back_at_step(self, reason: str) -> None:
        """Falls back at the next step. Until then uses are recorded as before: a checkpoint has to save the same
        tensors when it runs again, and other ranks may capture together with this one."""
        self.reason = reason

    def note_refresh_bytes(self, number: int) -> None:
        """Raises NotPerSample if a refresh would take more bytes than it may, beside those that wait."""
        check_bytes(self.bytes_taken + number, self.refresh_memory)
        self.refresh_bytes = self.held.of(id(self)) + number

    @property
    def bytes_taken(self) -> int:
        """The part of ``refresh_memory`` that is taken by what waits. What other matrices may take beyond this bound
        is not in it."""
        spare = max(0, self.held.limit - self.refresh_memory)
        return max(self.held.of(id(self)), self.held.total - spare)

    @property
    def falls_back(self) -> bool:
        """Returns True if nothing needs to be recorded, as the matrix falls back at the next step."""
        return bool(self.reason) and not self.captured_jointly

    def apply_fallback(self) -> None:
        """Runs at the step. Ranks that capture together agree on the fallback elsewhere."""
        if self.falls_back:
            self.fall_back(self.reason)

    @property
    def dtype(self) -> torch.dtype:
        """Curvature is float32, or float64 for a float64 model."""
        return torch.float64 if self.params[0].dtype == torch.float64 else torch.float32

    def side(self, wanted: str) -> str:
        """Returns "left" or "right". The paper's rule, "smaller", is left if m <= n and right if m > n."""
        if wanted != "smaller":
            return wanted
        return "left" if self.layout.rows <= self.layout.cols else "right"

    def partition(self, wanted: str, block_size: int | None) -> BlockPartition:
        """Returns the blocks of L or R."""
        d = self.layout.rows if self.side(wanted) == "left" else self.layout.cols
        return BlockPartition.of(self.groups, d, d if block_size is None else block_size)

    def partition_of(self, group: Mapping[str, Any]) -> BlockPartition:
        """The same by the options of a parameter group; cached, since a step needs it several times."""
        if self.fixed_partition is not None:
            return self.fixed_partition
        key = (group.get("side", "smaller"), group.get("block_size"))
        if key not in self._partitions:
            self._partitions[key] = self.partition(*key)
        return self._partitions[key]


@dataclass
class Use:
    """A module's use of a matrix. ``parts`` has, for each name of the spec, the index of the matrix's parameter."""

    module: nn.Module
    rule: LayerRule
    spec_index: int  # in the list of ``rule.matrices(module)``
    matrix: ParameterMatrix
    parts: tuple[int | None, ...]

    @property
    def active(self) -> tuple[bool, ...]:
        return tuple(part is not None and self.matrix.active[part] for part in self.parts)

    @property
    def columns(self) -> list[int]:
        """The columns of the matrix that this use has."""
        layout, parts = self.matrix.layout, self.matrix.parts
        return [c for part in self.parts if part in parts for c in layout.columns(parts.index(part))]


def separate(matrix: ParameterMatrix) -> list[ParameterMatrix]:
    """Splits a matrix into one for each parameter."""
    parts = []
    for name, param, kind in zip(matrix.names, matrix.params, matrix.kinds, strict=True):
        part = ParameterMatrix([name], [param], [kind], matrix.groups, matrix.source)
        part.lookup, part.sparse = matrix.lookup, matrix.sparse
        parts.append(part)
    return parts


def lone_matrix(name: str, param: nn.Parameter, module: nn.Module | None = None) -> ParameterMatrix:
    """Makes the matrix of a parameter without a rule."""
    spec = spec_of(name, param.shape, module)
    return ParameterMatrix([name], [param], [*spec.kinds], spec.groups)


def collect(model: nn.Module | None, params: Mapping[nn.Parameter, str]) -> tuple[list[ParameterMatrix], list[Use]]:
    """Returns the matrices of all parameters, in the order of ``params``, and the uses that the recorder watches."""
    matrices: list[ParameterMatrix] = []
    uses: list[Use] = []
    of_param: dict[nn.Parameter, tuple[ParameterMatrix, int]] = {}
    clashes: set[nn.Parameter] = set()

    def bind(module: nn.Module, rule: LayerRule, index: int, spec: MatrixSpec, source: str) -> None:
        found = [(i, p) for i, name in enumerate(spec.names) if (p := _get(module, name)) is not None and p in params]
        if not found:
            return
        known = [of_param[p][0] for _, p in found if p in of_param]
        if known:
            matrix = known[0]
        else:
            names, kinds = [params[p] for _, p in found], [spec.kinds[i] for i, _ in found]
            matrix = ParameterMatrix(names, [p for _, p in found], kinds, spec.groups, source)
            matrices.append(matrix)
            of_param.update({p: (matrix, j) for j, (_, p) in enumerate(found)})
        looks_up = "only" if rule.looks_up else ""
        matrix.lookup = looks_up if not known or matrix.lookup == looks_up else "also"
        matrix.sparse = matrix.sparse or bool(getattr(module, "sparse", False))
        matrix.own_forward = matrix.own_forward or has_own_forward(module)
        own = [(i, of_param[p][1]) for i, p in found if p in of_param and of_param[p][0] is matrix]
        if matrix.groups != spec.groups or any(matrix.kinds[part] != spec.kinds[i] for i, part in own):
            clashes.update(p for _, p in found)
            return
        parts: list[int | None] = [None] * len(spec.names)
        for i, p in found:
            if p in of_param and of_param[p][0] is not matrix:
                clashes.add(p)
                continue
            if p not in of_param:
                matrix.names.append(params[p])
                matrix.params.append(p)
                matrix.kinds.append(spec.kinds[i])
                of_param[p] = (matrix, len(matrix.params) - 1)
            parts[i] = of_param[p][1]
        matrix.update_layout()
        uses.append(Use(module, rule, index, matrix, tuple(parts)))

    claimed: set[nn.Module] = set()
    unknown = UnknownModuleRule()
    for module in model.modules() if model is not None else ():
        if module in claimed or isinstance(module, torch.jit.ScriptModule):  # hooks do not run in a ScriptModule
            continue
        if isinstance(module, ParametrizationList):  # computes a weight, of no samples
            claimed.update(module.modules())
            continue
        rule = rule_for(module)
        if rule is not None:
            for index, spec in enumerate(rule.matrices(module)):
                bind(module, rule, index, spec, "sample")
            if rule.claims_children:
                claimed.update(module.modules())
        elif _is_leaf(module):
            for index, spec in enumerate(unknown.matrices(module)):
                bind(module, unknown, index, spec, "vmap")
    in_model = set(params if model is None else model.parameters())
    scripted = {
        param
        for module in (model.modules() if model is not None else ())
        if isinstance(module, torch.jit.ScriptModule)
        for param in module.parameters()
    }
    owners = {p: module for module in ([] if model is None else model.modules()) for p in module._parameters.values()}
    for param, name in params.items():
        if param not in of_param:
            matrices.append(lone_matrix(name, param, owners.get(param)))
            uncovered = reasons.SCRIPTED if param in scripted else reasons.NO_RULE
            matrices[-1].reason = uncovered if param in in_model else reasons.NOT_IN_MODEL
            of_param[param] = (matrices[-1], 0)
    for param in clashes:
        of_param[param][0].fall_back(reasons.LAYOUTS_DIFFER)
    uses = [use for use in uses if use.matrix.source != "batch"]
    order = {param: i for i, param in enumerate(params)}
    matrices.sort(key=lambda matrix: min(order[p] for p in matrix.params))
    return matrices, uses


def _get(module: nn.Module, name: str) -> nn.Parameter | None:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    return owner._parameters.get(last)


def _is_leaf(module: nn.Module) -> bool:
    if isinstance(module, nn.ParameterList | nn.ParameterDict):  # never called
        return False
    own = any(p is not None for p in module._parameters.values())
    return own and not any(True for child in module.children() for _ in child.parameters())


def named(params: Iterable[tuple[str, nn.Parameter]]) -> dict[nn.Parameter, str]:
    """Names by parameter, a tied parameter under its first name."""
    names: dict[nn.Parameter, str] = {}
    for name, param in params:
        names.setdefault(param, name)
    return names
