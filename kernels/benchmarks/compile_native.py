"""Compiles the native kernels ahead of time, without a GPU, and says what each takes of the chip.

    python kernels/benchmarks/compile_native.py [CHIP ...] [--json] [--only gemm|quantize]      chips: 100 103 120

Registers and spills (local memory) are ptxas's, of the machine code for that chip; shared and tensor memory are what a
launch asks for.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from nvfp4_kernels.native import gemm_kernel, quantize_kernels
from nvfp4_kernels.native.matmul_triton import TILES, Tile
from nvfp4_kernels.triton.ops import OPTIONS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Registers a thread; bytes of shared memory a program may have; columns of tensor memory.
LIMITS = {
    100: {"registers": 255, "shared": 232448, "tensor": 512},
    103: {"registers": 255, "shared": 232448, "tensor": 512},
    120: {"registers": 255, "shared": 101376, "tensor": 0},
}
OUTPUTS = {"bf16": torch.bfloat16, "fp32": torch.float32}
INSTRUCTIONS = r"(?:tcgen05\.mma|mma\.sync|cvt\.r[ns]\.satfinite\.e2m1x\d)[\w:.]*"
KEY = ("*i64",) * 4 + ("i32",) * 3


def build(kernel, chip: int, types: dict[str, object], constants: dict[str, object], options: dict) -> dict:
    """Compile; what was built. Pointers are taken as aligned, as PyTorch allocates them."""
    at = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = [n for n, t in signature.items() if isinstance(t, str) and t.startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={at[name]: value for name, value in constants.items()},
        attrs={at[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(re.search(rf"\b{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL")}
    return {
        "chip": chip,
        "registers": found["REG"],
        "spilled": found["STACK"] + found["LOCAL"],
        "shared": metadata.shared,
        "tensor": getattr(metadata, "tmem_size", 0) or 0,
        "instructions": sorted(set(re.findall(INSTRUCTIONS, ptx))),
        "tma": len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
    }


def products(chip: int) -> Iterator[dict]:
    """The GEMM in every tile shape that is tried on the chip, for each kind of output."""
    for tile in TILES[chip // 10]:
        for output, accumulate in (("bf16", False), ("fp32", False), ("fp32", True)):
            shape = f"{tile.m}x{tile.n}x{tile.k}, {tile.stages} stages, {tile.warps} warps"
            name = f"gemm {shape} -> {output}{', added' if accumulate else ''}"
            yield {"kernel": name, **build_product(chip, tile, output, accumulate)}


def build_product(chip: int, tile: Tile, output: str, accumulate: bool) -> dict:
    """One GEMM."""
    parts = tile.parts(OUTPUTS[output])
    types = {
        "a": f"tensordesc<u8[{tile.m},{tile.k // 2}]>",
        "a_scales": f"tensordesc<u8[1,{tile.m // 128},{tile.k // 64},2,256]>",
        "b": f"tensordesc<u8[{tile.n},{tile.k // 2}]>",
        "b_scales": f"tensordesc<u8[1,{tile.n // 128},{tile.k // 64},2,256]>",
        "out": f"tensordesc<{output}[{tile.m},{tile.n // parts}]>",
        "alpha": "*fp32",
        **dict.fromkeys(("M", "N", "K", "PROGRAMS"), "i32"),
    }
    constants = {
        "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "PARTS": parts, "STAGES": tile.stages,
        "ACCUMULATE": accumulate, "EMULATE": False,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return build(gemm_kernel.gemm_kernel, chip, types, constants, options)


def quantizers(chip: int) -> Iterator[dict]:
    """The quantize kernels as a training step uses them: forward, backward, weights."""
    roundings = ["nearest", "stochastic"] + ["hardware"] * (chip != 120)
    for rounding in roundings:
        yield {"kernel": f"rows + columns {rounding}", **build_quantizer(chip, rounding)}
    types = {
        "x": "*i64",
        "amax": "*fp32",
        "row_out": "*i16",
        "column_out": "*i64",
        **dict.fromkeys(SIZES, "i32"),
        **SCALES,
    }
    built = build(
        quantize_kernels.quantize_square_kernel, chip, types, {"BF16": True}, {"num_warps": 2, **OPTIONS}
    )
    yield {"kernel": "16x16 weights, both ways", **built}


SIZES = ("rows", "cols", "row_stride", "column_stride")
SCALES = {"row_scales": "*u8", "column_scales": "*u8"}


def build_quantizer(chip: int, rounding: str) -> dict:
    """Rows and columns of a bf16 matrix, the columns transformed."""
    types = {
        "x": "*i64", "row_out": "*i64", "column_out": "*i64", "row_amax": "*fp32", "column_amax": "*fp32",
        "row_key": KEY, "column_key": KEY, **dict.fromkeys(SIZES, "i32"), **SCALES,
    }  # fmt: skip
    constants = {"BF16": True, "ROW": rounding, "COLUMN": rounding, "SIGNS": 0xD7E8}
    if rounding == "nearest":
        constants |= {"row_key": None, "column_key": None}
    return build(quantize_kernels.quantize_kernel, chip, types, constants, {"num_warps": 2, **OPTIONS})


def main() -> None:
    """Compile for the chips asked for and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chips", nargs="*", type=int, default=list(LIMITS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=["gemm", "quantize"])
    args = parser.parse_args()
    kinds = {"gemm": products, "quantize": quantizers}
    rows = [
        row
        for chip in args.chips
        for kind, make in kinds.items()
        if args.only in (None, kind)
        for row in make(chip)
    ]
    if args.json:
        print(json.dumps(rows))
        return
    print(f"Triton {triton.__version__}\n")
    print(
        "| chip | kernel | registers | spilled bytes | shared bytes | tensor memory columns | instruction |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        row = row | {
            "chip": f"sm_{row['chip']}",
            "instructions": ", ".join(f"`{i}`" for i in row["instructions"]),
        }
        names = ("chip", "kernel", "registers", "spilled", "shared", "tensor", "instructions")
        print("| " + " | ".join(str(row[name]) for name in names) + " |")


if __name__ == "__main__":
    main()
