from __future__ import annotations

import pathlib

import pytest

from nvfp4_train import export


@pytest.fixture(scope="session")
def exported(tiny_run, tmp_path_factory) -> dict[str, pathlib.Path]:
    """The tiny run, exported: {"bf16", "fp32", "nvfp4"}. Not to be written to."""
    root = tmp_path_factory.mktemp("exported")
    words = {"bf16": ["dtype=bf16"], "fp32": ["dtype=fp32"], "nvfp4": ["format=nvfp4"]}
    for name, options in words.items():
        export.main([f"run={tiny_run.path}", f"out={root / name}", *options])
    return {name: root / name for name in words}
