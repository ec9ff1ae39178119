"""An optimizer without its step: construction, parameter groups, the matrices that parameters form, refreshes that are
due, and checkpoints. The step is in :mod:`ngplus.optimizers.base`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, ParamsT

from ngplus.capture.accumulator import Accumulator
from ngplus.capture.batch import BatchDims
from ngplus.capture.collector import Collector
from ngplus.capture.matrices import ParameterMatrix, Use, collect, named
from ngplus.capture.sample_index import SampleIndex
from ngplus.diagnostics.health import FaultCounter
from ngplus.distributed import full_state
from ngplus.distributed.collectives import DISTRIBUTIONS, Distributor, RankGroup, ReplicatedDistributor
from ngplus.distributed.sharded import sharded_distributors
from ngplus.fisher.products import REFRESH_MEMORY
from ngplus.optimizers import checkpoints, options
from ngplus.optimizers.param_groups import check_model, check_parameters, inside, labels, with_names
from ngplus.preconditioners.base import MatrixPreconditioner
from ngplus.utils.typing import Group, State
from ngplus.utils.validation import choice
from ngplus.utils.warnings import no_such_name

# Arguments of the optimizer that a parameter group does not take.
NOT_IN_GROUPS = ("model", "batch_dim", "sample_index", "process_group", "distribution")
ON_ALL_RANKS = ("momentum_buffer", "refreshed")  # state that every rank has, and not only the owner
# Options that decide whether a matrix is due for a refresh.
REFRESH_OPTIONS = ("step", "update_every", "curvature", "side", "block_size", "sketch")


def every(step: int, update_every: int) -> bool:
    """k mod T == 0."""
    return step % update_every == 0


class MatrixOptimizer(Optimizer):
    """An optimizer whose parameters form matrices, each with a preconditioner and, on several ranks, a distributor."""

    _accumulator_type: type[Accumulator] = Accumulator
    _refresh_rule: Callable[[int, int], bool] = staticmethod(every)  # from k and T: is this a step with a refresh?
    _identifying_options: tuple[str, ...] = ("lr", "damping", "update_every", "step")  # in every checkpoint
    _harmless_faults: tuple[str, ...] = ()  # of which there is no warning
    _keys_in_param_dtype: tuple[str, ...] = ("momentum_buffer",)  # as torch has it; other state keeps its own

    def __init__(
        self,
        params: nn.Module | ParamsT,
        model: nn.Module | None,
        batch_dim: BatchDims,
        defaults: dict[str, Any],
        process_group: ProcessGroup | None = None,
        distribution: str = "communication",
        sample_index: SampleIndex | None = None,
    ) -> None:
        choice("distribution", distribution, DISTRIBUTIONS)
        self._distribution = distribution
        if sample_index is not None and not callable(sample_index):
            raise ValueError(f"Invalid sample_index: {sample_index!r} (a function of the model's inputs)")
        defaults = {**defaults, "step": 0, "state_version": checkpoints.VERSION}
        self._check(defaults)
        self._option_names = tuple(defaults)
        if isinstance(params, nn.Module):
            if model is not None and model is not params:
                raise ValueError(
                    f"{type(self).__name__} got two models, one in place of the parameters and one as model=: pass one"
                )
            model = params
            params = list(inside(model).named_parameters())
            if not params:
                raise ValueError(f"The model {type(model).__name__} has no parameters: there is nothing to train")
        if model is not None:
            check_model(model)
        self._ranks = RankGroup.of(model, process_group)
        # A compiled model's hooks would be compiled with it: watch the model inside, and run refresh steps eagerly.
        self._model = None if model is None else inside(model)
        self._compiled = model if hasattr(model, "_orig_mod") else None
        self._batch_dim: BatchDims = dict(batch_dim) if isinstance(batch_dim, Mapping) else batch_dim
        self._sample_index = sample_index
        self._matrices: list[ParameterMatrix] = []
        self._collector: Collector | None = None
        super().__init__(params, defaults)
        own = set() if self._model is None else set(self._model.parameters())
        if self._model is not None and own.isdisjoint(p for group in self.param_groups for p in group["params"]):
            raise ValueError(
                f"None of the parameters belongs to model=, a {type(self._model).__name__}: pass the model that they "
                "belong to (a copy has other parameters, and so has a model that was sharded afterwards)"
            )
        self._bind_parameters()

    # ---------------------------------------------------------------------------------------------- of each method

    def _captures(self, group: Mapping[str, Any]) -> bool:
        """Returns True if this group's curvature comes from captured per-sample gradients."""
        return True

    def _preconditioner(self, matrix: ParameterMatrix, group: Group, state: State) -> MatrixPreconditioner:
        """The preconditioner of a matrix, for one step."""
        raise NotImplementedError

    def _collect(self, params: Mapping[nn.Parameter, str]) -> tuple[list[ParameterMatrix], list[Use]]:
        """The matrices that these parameters form, and the modules' uses of them, for the capture."""
        return collect(self._model, params)

    def _check(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError for the first invalid option."""
        options.check(group)

    # ---------------------------------------------------------------------------------------------- matrices

    def _bind_parameters(self) -> None:
        """Forms the matrices of all parameters and installs the hooks; called again when the parameters change."""
        if self._collector is not None:
            self._collector.remove()
        self._faults = self.__dict__.get("_faults") or FaultCounter(self._harmless_faults)
        self._warned = self._warned_of_replaced = False
        in_model = named(self._model.named_parameters(remove_duplicate=False)) if self._model is not None else {}
        names: dict[nn.Parameter, str] = {}
        for g, group in enumerate(self.param_groups):
            given = group.get("param_names") or labels(g, len(group["params"]))
            names.update({p: in_model.get(p, label) for p, label in zip(group["params"], given, strict=True)})
        self._names = names
        self._group_of_param: dict[nn.Parameter, Group] = {
            p: group for group in self.param_groups for p in group["params"]
        }
        # Empty parameters have no matrix.
        self._matrices, uses = self._collect({p: name for p, name in names.items() if p.numel() > 0})
        self._group_of_matrix = {id(matrix): self._group_of_param[matrix.params[0]] for matrix in self._matrices}
        # A matrix keeps its owner, which has its curvature.
        old: list[Distributor] = self.__dict__.get("_distributors", [])
        self._owners = {m.params[0]: distributor.owners[id(m)] for distributor in old for m in distributor.matrices}
        self._distributors: list[Distributor] = list(
            sharded_distributors(self._matrices, self._model, self._group_of_param, self._owners, self._ranks)
        )
        self._distributor_of = {
            id(matrix): distributor for distributor in self._distributors for matrix in distributor.matrices
        }
        self._collector = Collector(self._matrices, self._group_of_param, self._accumulator_type, self._rearm)
        self._find_replicas()
        if self._model is not None and any(map(self._captures, self.param_groups)):
            self._collector.watch(self._model, uses, self._batch_dim, self._sample_index, self._compiled)
        self._arm()

    def _follow_groups(self) -> bool:
        """Forms the matrices anew if the groups have other parameters: Accelerate shards a model by FSDP2 and then
        replaces the parameters in the groups of its optimizer."""
        given = {param for group in self.param_groups for param in group["params"]}
        if given == self._names.keys():
            return False
        self._bind_parameters()
        return True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as in torch.optim. The first refresh of its parameters is at the next step."""
        if isinstance(param_group, dict):
            if misplaced := [name for name in NOT_IN_GROUPS if name in param_group]:
                raise ValueError(
                    f"A parameter group does not take {', '.join(misplaced)}: pass it to "
                    f"{type(self).__name__}, for all groups"
                )
            param_group = {**param_group, "step": 0}
            merged = {**self.defaults, **param_group}
            self._check(merged)
            if self._captures(merged) and self._model is None:
                param_group = self._without_model(param_group)
            param_group = with_names(param_group, self.param_groups, self._model)
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        try:
            check_parameters(added)
        except ValueError:
            self.param_groups.pop()
            raise
        if self._matrices:
            self._bind_parameters()

    def _without_model(self, param_group: dict[str, Any]) -> dict[str, Any]:
        """The options of a group whose curvature would come from samples, if there is no module to capture them."""
        raise ValueError(
            f"{type(self).__name__} takes its curvature from the samples that the model sees: pass the module in place "
            "of its parameters, or as model="
        )

    def _find_replicas(self) -> None:
        """Finds the ranks of parameters that are not sharded. DistributedDataParallel may wrap the model later."""
        assert self._collector is not None
        ranks = self._ranks or RankGroup.of(self._collector.wrapper, None)
        if ranks is None or any(isinstance(distributor, ReplicatedDistributor) for distributor in self._distributors):
            return
        plain = [m for m in self._matrices if self._distributor(m) is None]
        if plain:
            self._distributors.append(
                ReplicatedDistributor(ranks, plain, self._group_of_param, self._distribution, self._owners)
            )
            self._distributor_of.update({id(matrix): self._distributors[-1] for matrix in plain})
            self._drop_remote_state()

    def _drop_remote_state(self) -> None:
        """Drops the state of matrices that other ranks own, so that a checkpoint holds it once."""
        for distributor in self._distributors:
            for matrix in distributor.matrices:
                if not distributor.has_curvature(matrix) and matrix.params[0] in self.state:
                    state = self.state[matrix.params[0]]
                    for key in [key for key in state if key not in ON_ALL_RANKS]:
                        del state[key]

    def _distributor(self, matrix: ParameterMatrix) -> Distributor | None:
        """The distributor of a matrix; None on one rank."""
        return self._distributor_of.get(id(matrix))

    def _group(self, matrix: ParameterMatrix) -> Group:
        """The options of a matrix: those of its first parameter's group."""
        return self._group_of_matrix[id(matrix)]

    @property
    def _device(self) -> torch.device:
        """That of the first parameter; all groups may be empty."""
        return next((param.device for param in self._names), torch.device("cpu"))

    def _find_matrix(self, which: str | nn.Parameter) -> ParameterMatrix:
        for matrix in self._matrices:
            if (which in matrix.names) if isinstance(which, str) else any(which is p for p in matrix.params):
                return matrix
        if not isinstance(which, str):
            raise KeyError(f"This optimizer has no such parameter of shape {tuple(which.shape)}: plan() lists all")
        raise KeyError(no_such_name(which, [name for m in self._matrices for name in m.names], "this optimizer"))

    # ---------------------------------------------------------------------------------------------- when to refresh

    def _due(self, matrix: ParameterMatrix) -> bool:
        group = self._group(matrix)
        return self._refresh_rule(group["step"], group["update_every"]) or not self._has_curvature(matrix)

    def _has_curvature(self, matrix: ParameterMatrix) -> bool:
        """Returns True if the matrix has curvature of its present size; by "refreshed", if only its owner has it."""
        # .get makes no entry: torch takes an optimizer without state for one that is not initialised.
        held, distributor = self.state.get(matrix.params[0], {}), self._distributor(matrix)
        if held.get("refreshed") != self._refresh_key(matrix):
            return False
        remote = distributor is not None and distributor.kept_by_owner_only(matrix)
        return remote or self._preconditioner(matrix, self._group(matrix), held).fits()

    def _refresh_key(self, matrix: ParameterMatrix) -> int:
        """A number for the side, blocks and dtype of the curvature; torch's load_state_dict does not take strings."""
        group = self._group(matrix)
        side, partition = matrix.side(group.get("side", "smaller")), matrix.partition_of(group)
        return zlib.crc32(f"{side} {partition} {matrix.dtype}".encode())

    def _arm(self) -> None:
        self._armed_by = self._arming_options()
        for matrix in self._matrices:
            matrix.not_captured, matrix.double_backward = "", False
            group = self._group(matrix)
            matrix.armed = self._captures(group) and matrix.source != "batch" and self._due(matrix)
            matrix.refresh_memory = group.get("refresh_memory", REFRESH_MEMORY)
        if self._collector is not None:
            self._collector.note_armed()

    def _rearm(self, changed: bool) -> None:
        """Arms the capture again before a forward pass, if a matrix or an option has changed since the last step."""
        if changed or self._arming_options() != self._armed_by:
            self._arm()

    def _arming_options(self) -> list[list[Any]]:
        return [[group.get(name) for name in REFRESH_OPTIONS] for group in self.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients, as in torch.optim, and what was captured with them."""
        self._follow_groups()
        if self._collector is not None:
            self._collector.drop()
        super().zero_grad(set_to_none)

    # ---------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim. State that one rank alone keeps is in the ``state_dict`` of that rank; of all ranks, if
        ``get_optimizer_state_dict`` of torch.distributed.checkpoint asks with ``full_state_dict=True``."""
        found = super().state_dict()
        if self._distributors and full_state.is_wanted():
            params = dict.fromkeys(param for group in self.param_groups for param in group["params"])
            numbers = {param: i for i, param in enumerate(params)}
            for distributor in self._distributors:
                matrices = [m for m in distributor.matrices if distributor.kept_by_owner_only(m)]
                held = [found["state"].get(numbers[m.params[0]], {}) for m in matrices]
                own = [{key: value for key, value in state.items() if key not in ON_ALL_RANKS} for state in held]
                owners = [distributor.owners[id(m)] for m in matrices]
                sent = full_state.gather(distributor.ranks, owners, own, self._device)
                for matrix, state, new in zip(matrices, held, sent, strict=True):
                    found["state"][numbers[matrix.params[0]]] = {**state, **new}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, as in torch.optim; curvature keeps its own dtype.

        Raises a ValueError, and changes nothing, for a state that is damaged, of another optimizer, or newer.
        """
        seen: list[dict[str, Any]] = []  # the state after the user's own hooks

        def check(_: Optimizer, given: dict[str, Any]) -> None:
            own = [[(self._names[p], p) for p in group["params"]] for group in self.param_groups]
            whose, known = type(self).__name__, self._identifying_options
            checkpoints.check(given, own, whose, lambda group: self._check(self._loaded(group)), known)
            seen.append(given)

        self._follow_groups()
        if full_state.is_loading():
            self._refuse_frozen_owners()
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        ids = [i for group in seen[-1]["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, param in zip(ids, params, strict=True):
            for key, value in seen[-1]["state"].get(i, {}).items():
                if isinstance(value, Tensor) and key not in self._keys_in_param_dtype:
                    self.state[param][key] = value.detach().clone().to(param.device)
                elif isinstance(value, dict) and not value:  # how a distributed checkpoint says "not there"
                    self.state[param].pop(key, None)
        for group in self.param_groups:
            loaded = self._loaded(group)
            group.update({key: loaded[key] for key in self._option_names})
            for key in checkpoints.REMOVED.keys() - set(self._option_names):
                group.pop(key, None)
        self._group_of_param.update({param: group for group in self.param_groups for param in group["params"]})
        self._group_of_matrix = {id(matrix): self._group_of_param[matrix.params[0]] for matrix in self._matrices}
        if any(group.get("state_version", 0) < checkpoints.VERSION for group in seen[-1]["param_groups"]):
            for matrix in self._matrices:  # older layouts have other keys
                held = self.state.get(matrix.params[0], {})
                if "refreshed" in held and self._preconditioner(matrix, self._group(matrix), held).fits():
                    held["refreshed"] = self._refresh_key(matrix)
        for distributor in self._distributors:
            for matrix in filter(distributor.owns, distributor.matrices):
                held = self.state.get(matrix.params[0], {})
                fits = self._preconditioner(matrix, self._group(matrix), held).fits()
                made = held.get("refreshed") == self._refresh_key(matrix)  # else it is due for a refresh
                if distributor.kept_by_owner_only(matrix) and made and not fits:
                    raise RuntimeError(
                        f"The loaded state does not have the curvature of {matrix.name!r}. If each rank keeps a share, "
                        "save with torch.distributed.checkpoint, or save each rank's state in its own file"
                    )
        self._drop_remote_state()
        if self._collector is not None:
            self._collector.forget()
        self._arm()

    def _refuse_frozen_owners(self) -> None:
        """Raises ValueError if a matrix has its curvature with a frozen parameter, whose state torch does not load."""
        for matrix in self._matrices:
            first, *others = matrix.params
            if not first.requires_grad and any(param.requires_grad for param in others):
                raise ValueError(
                    f"The curvature of {', '.join(matrix.names)} is in the state of {matrix.name!r}, which is frozen, "
                    "and torch.distributed.checkpoint does not load the state of frozen parameters. Freeze all of "
                    "them, or save optimizer.state_dict() of each rank in a file of its own"
                )

    def _loaded(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a saved group; those that its checkpoint does not have get their defaults."""
        return {**self.defaults, **checkpoints.renewed(group)}

    def __getstate__(self) -> dict[str, Any]:
        own = ("_model", "_batch_dim", "_sample_index", "_option_names", "_distribution")
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in own}, "_compiled": None, "_ranks": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_matrices" not in self.__dict__:  # a copy, and not Optimizer.load_state_dict
            self._collector = None
            self._bind_parameters()
