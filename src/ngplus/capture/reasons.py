"""Why a matrix has mini-batch curvature. ``docs/troubleshooting.md`` explains each of these, in the same words.

A reason may be followed by a detail, such as the name of a function: :func:`with_detail`.
"""

from __future__ import annotations

# The parameter.
NO_RULE = "no layer rule covers it"
NOT_IN_MODEL = "it is not a parameter of the given model"
LAYOUTS_DIFFER = "its modules use it in different layouts"
SHARDED = "its parameters are sharded, and no layer rule covers it"
SCRIPTED = "its module is a torch.jit script, which runs no hooks"
PROJECTION = "a projection of its attention module is not a parameter"

# What was called, and how.
NOT_CALLED = "its module was not called"
EVAL = "its module was called in eval() mode"
NO_GRAD = "its module was called under no_grad() only"
FUNCTIONAL = "its module was called by torch.func"
NOT_REACHED = "no gradient reached the output of its module"
ZEROED = "its gradients were set to zero after the backward pass"
OUTSIDE = "its module was called outside of the model's forward pass"
SEVERAL_CALLS = "several calls of its module take part in one backward pass"
UNEQUAL_CALLS = "calls with different numbers of samples take part in one backward pass"
CAME_TWICE = "its gradient came twice, though the graph was not retained"
OTHER_USES = "part of its gradient does not come from calls of its module"
DOUBLE_BACKWARD = "part of its gradient comes from a double backward"
RETURNED = "autograd.grad computed its gradient beside another pass"
OTHER_RANK = "another rank has no per-sample curvature for it"

# The module, and what it takes and returns.
OWN_FORWARD = "no rule fits the forward of its module"
SEVERAL_FUNCTIONS = "its module gives its parameters to several functions"
NOT_BY_FUNCTIONS = "its weight is not computed by torch functions"
COMPUTED_IN_PLACE = "its module changes in place what its weight is computed from"
COMPUTED_FROM_OTHERS = "its weight is computed from other tensors than its parameters"
COMPUTED_SINCE = "its weight was parametrized after the optimizer was created"
NO_DERIVATIVE = "the derivative of its weight is not known"
RANDOM_WEIGHT = "its weight differs when it is computed again"
TOO_LARGE = "a refresh would take more memory than refresh_memory"
BACKWARD_HOOKS = "its attention module has backward hooks"
NO_TENSOR = "its module takes or returns something other than a tensor"
NOT_STRIDED = "its module takes or returns a sparse or nested tensor"
INPUT_CHANGED = "the input of its module was changed in place"
VMAP_FAILED = "vmap does not apply to its module"
VMAP_IN_PLACE = "its module changes its inputs in place"
VMAP_OUTPUTS = "its module has several outputs"
VMAP_NO_BATCH = "no input of its module has the batch dimension of its output"

# Which row is of which sample.
SAMPLE_COUNT = "the number of samples of the model's inputs is not clear"
ACROSS = "a layer of the model runs over the dimension of the samples"
ROWS_UNKNOWN = "the samples of its input are not known"
SHARED_INPUT = "its input is the same for all samples, or was not made by torch functions"
SHARED_INDEX = "its index has no batch dimension"
SHARED_OUTPUT = "its output, the same for all samples, is not only added"
NO_SAMPLE_INDEX = "sample_index has no entries for the rows of its output"


def with_detail(reason: str, detail: object) -> str:
    """Returns the reason with a detail of this case.

    Examples:
        >>> with_detail(ROWS_UNKNOWN, "after sort")
        'the samples of its input are not known: after sort'
    """
    return f"{reason}: {detail}"


def without_detail(text: str) -> str:
    """Returns the reason that a text begins with.

    Examples:
        >>> without_detail("the samples of its input are not known: after sort")
        'the samples of its input are not known'
    """
    return text.partition(": ")[0]
