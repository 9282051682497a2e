"""Which operand of which GEMM runs in which format, and the linear layer that does it."""

from nvfp4_train.precision.linear import Linear
from nvfp4_train.precision.recipe import LinearPlan, plan_for
from nvfp4_train.precision.runtime import PrecisionRuntime, apply_recipe

__all__ = ["Linear", "LinearPlan", "PrecisionRuntime", "apply_recipe", "plan_for"]
