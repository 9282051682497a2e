from __future__ import annotations

import pytest

from nvfp4_train.config.schema import ModelConfig
from tests.tiny import every_block


@pytest.fixture
def tiny() -> ModelConfig:
    return every_block()
