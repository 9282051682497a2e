"""What the Dockerfile's pip steps do with our own package, without a network.

Shown here: the package builds from what .dockerignore leaves, its dependencies as declared are met by this environment's
packages, and it runs outside the repository, with all that it reads. Not shown here: that an index gives those dependencies,
since a path file lends the new environment the ones that are installed; nor the image itself, which needs Docker and
NVIDIA's registry.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
_HELP = "import nvfp4_train; from nvfp4_train import pretrain; pretrain.main(['--help']); print(nvfp4_train.__file__)"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_its_pip_steps_install_a_program_that_runs_outside_the_repository(tmp_path):
    steps = re.findall(r"^RUN (python -m pip install .+)$", DOCKERFILE, re.MULTILINE)
    assert steps
    # torch and the like are the base image's; here all dependencies are this environment's, and nothing is downloaded.
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(
        sysconfig.get_path(
            "purelib", vars={"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")}
        )
    )
    (site / "base_image.pth").write_text(sysconfig.get_path("purelib") + "\n")
    source = tmp_path / "source"
    ignored = (ROOT / ".dockerignore").read_text().split()
    shutil.copytree(
        ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*(n.removeprefix("**/") for n in ignored))
    )
    for step in steps:
        words = step.replace("/opt/nvfp4_train", str(source)).split()[3:]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--python", python, *words],
            env={
                "PIP_NO_INDEX": "1",
                "PIP_NO_BUILD_ISOLATION": "0",
                "PATH": "/usr/bin:/bin",
            },  # "0" turns it off
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(
        [python, "-c", _HELP],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(str(site))
    assert "quickstart" in done.stdout  # the configurations came along


def test_it_doesnt_run_as_root_and_names_its_base():
    assert re.search(r"^ARG BASE=nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3$", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE) == ["${UID}"]
