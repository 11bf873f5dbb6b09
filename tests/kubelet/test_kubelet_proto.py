"""The committed messages are what the .proto files say."""

import subprocess
import sys
from pathlib import Path

import gpunode.kubelet.proto as proto

PACKAGE = Path(proto.__file__).parent
SRC = PACKAGE.parents[2]


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    files = sorted(str(p.relative_to(SRC)) for p in PACKAGE.glob("*.proto"))
    assert len(files) == 5
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", str(SRC), f"--python_out={tmp_path}",
         f"--pyi_out={tmp_path}", *files],
        check=True, cwd=SRC,
    )  # fmt: skip
    fresh = {p.name: p.read_text() for p in tmp_path.rglob("*_pb2.py*")}
    committed = {p.name: p.read_text() for p in PACKAGE.glob("*_pb2.py*") if p.suffix in (".py", ".pyi")}
    assert len(fresh) == 10
    assert fresh == committed
