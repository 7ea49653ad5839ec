"""A model as a map of memory: written from a checkpoint or a running job, checked, and refused where it is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crc32c
import jsonschema
import msgspec
import pytest
import torch
from safetensors.torch import save_file

from awex_core import cli
from awex_core.checkpoint.manifest import ALIGNMENT, MemoryMap, map_memory, read_map
from awex_core.errors import ConfigError, LayoutError
from awex_core.layout import CanonicalTensor
from awex_core.settings.config import SyncConfig
from awex_core.testing.fake_engine import fake_weights
from tests.core import test_sync
from tests.core.test_sync import Loop, Trainer, eventually, serves
from tests.rules.tree import ROOT

meta, loop, make_trainer, config = test_sync.meta, test_sync.loop, test_sync.make_trainer, test_sync.config

SCHEMA = ROOT / "docs" / "manifest.schema.json"

ORACLE = """
import json, struct, sys
from pathlib import Path
found = {}
for file in Path(sys.argv[1]).glob("*.safetensors"):
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            found[name] = [entry["shape"], entry["dtype"], entry["data_offsets"][1] - entry["data_offsets"][0]]
print(json.dumps(found))
"""
"""Reads safetensors by their format; none of our code."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "model"
    found.mkdir()
    weights = {f"model.layers.{layer}.w": torch.randn(3, 5, dtype=torch.bfloat16) for layer in range(3)}
    save_file(weights | {"model.layers.10.scale": torch.ones(2, 2).to(torch.float8_e4m3fn)}, found / "a.safetensors")
    save_file({"lm_head.weight": torch.randn(7, 5)}, found / "b.safetensors")
    return found


def export(folder: Path, *more: str) -> dict[str, Any]:
    output = folder.parent / "manifest.json"
    assert cli.main(["export", "--model", str(folder), "--output", str(output), *more]) == 0
    written: dict[str, Any] = json.loads(output.read_text())
    jsonschema.validate(written, json.loads(SCHEMA.read_text()))
    return written


def test_it_names_every_tensor_of_the_files(folder: Path) -> None:
    run = subprocess.run([sys.executable, "-c", ORACLE, folder], capture_output=True, text=True, check=True, timeout=60)
    expected = json.loads(run.stdout)
    written = export(folder)
    codes = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}
    found = {t["name"]: [t["shape"], codes[t["dtype"]], t["nbytes"]] for t in written["tensors"]}
    assert found == expected
    assert {t["name"]: t.get("layer") for t in written["tensors"]} == {
        "lm_head.weight": None,
        "model.layers.0.w": 0,
        "model.layers.1.w": 1,
        "model.layers.2.w": 2,
        "model.layers.10.scale": 10,
    }
    end = 0
    for tensor in written["tensors"]:
        assert tensor["offset"] % ALIGNMENT == 0 and tensor["offset"] >= end
        end = tensor["offset"] + tensor["nbytes"]
    assert end <= written["nbytes"] < end + ALIGNMENT


def test_another_dtype_converts_what_is_floating_point(folder: Path) -> None:
    written = export(folder, "--dtype", "bf16", "--checksums")
    kinds = {t["name"]: (t["dtype"], t["nbytes"], t["crc32c"]) for t in written["tensors"]}
    head = torch.frombuffer(bytearray((folder / "b.safetensors").read_bytes()[-7 * 5 * 4 :]), dtype=torch.float32)
    packed = head.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert kinds["lm_head.weight"] == ("bfloat16", 7 * 5 * 2, f"{crc32c.crc32c(packed):08x}")
    assert kinds["model.layers.10.scale"][0] == "float8_e4m3fn"


def test_check_says_what_differs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(folder)
    check = ["check", "--model", str(folder), "--manifest", str(folder.parent / "manifest.json")]
    assert cli.main(check) == 0
    assert cli.main([*check, "--dtype", "float16"]) == 1
    save_file({"lm_head.weight": torch.randn(7, 6), "new": torch.zeros(1)}, folder / "b.safetensors")
    capsys.readouterr()
    assert cli.main(check) == 1
    said = capsys.readouterr().err
    assert "2 differences" in said and "lm_head.weight: shape (7, 6), in the manifest (7, 5)" in said
    assert "new: only in the model" in said


def test_a_trainer_and_an_engine_are_exported_alike(
    config: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = loop.engine("e", 2, config)
    make_trainer().write(1)
    eventually(lambda: serves(engine) is not None)
    monkeypatch.setenv("AWEX_TOKEN", config.token)
    maps = {}
    for name, source in {"trainer": ["--trainer"], "engine": ["--engine", "e"]}.items():
        file = tmp_path / f"{name}.json"
        where = ["--meta-server", config.meta_server, "--job", config.job, *source]
        assert cli.main(["export", "--output", str(file), *where]) == 0
        maps[name] = read_map(file)
        assert cli.main(["check", "--manifest", str(file), *where]) == 0
    assert maps["trainer"] == maps["engine"]
    assert {t.name: t.shape for t in maps["engine"].tensors} == {n: tuple(t.shape) for n, t in fake_weights().items()}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "no/such-model"], "neither a folder nor a model in the Hub's local cache"),
        (["--trainer"], "say where it is with --meta-server"),
        (["--trainer", "--meta-server", "SERVER"], "nobody has joined it|has no trainer"),
        (["--engine", "x", "--meta-server", "SERVER"], "nobody has joined it|has no engine 'x'"),
        (["--trainer", "--meta-server", "SERVER", "--checksums"], "nobody has joined it|reads the weights of --model"),
    ],
)
def test_what_cannot_be_exported_is_said(
    arguments: list[str],
    complaint: str,
    config: SyncConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("AWEX_TOKEN", config.token)
    given = [config.meta_server if word == "SERVER" else word for word in arguments]
    assert cli.main(["export", "--output", str(tmp_path / "m.json"), *given]) == 1
    said = capsys.readouterr().err
    assert any(part in said for part in complaint.split("|")), said
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_keeps_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = folder.parent / "nowhere" / "manifest.json"
    assert cli.main(["export", "--model", str(folder), "--output", str(output)]) == 1
    assert f"{output} cannot be written" in capsys.readouterr().err
    assert cli.main(["export", "--model", str(folder), "--output", str(output), "--dtype", "int3"]) == 1
    assert "'int3' is none that weights are converted to" in capsys.readouterr().err


TENSORS = [CanonicalTensor("a", (4, 2), "bfloat16"), CanonicalTensor("b", (3,), "float32")]


def spoiled(**fields: Any) -> Callable[[MemoryMap], MemoryMap]:
    """The second tensor changed."""

    def spoil(model: MemoryMap) -> MemoryMap:
        first, second = model.tensors
        return msgspec.structs.replace(model, tensors=(first, msgspec.structs.replace(second, **fields)))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (spoiled(offset=0), "within the tensor before it"),
        (spoiled(offset=257), "not aligned"),
        (spoiled(offset=1 << 70), "no manifest|the buffer has"),
        (spoiled(nbytes=11), "11 bytes for float32"),
        (spoiled(shape=(3, 0)), "has shape"),
        (spoiled(shape=(1 << 62, 1 << 62)), "has shape"),
        (spoiled(dtype="int3"), "'int3' is not supported"),
        (spoiled(name="a"), "not in the order of their names"),
        (spoiled(shape=(1, 3)), "not that of the tensors"),
        (lambda model: msgspec.structs.replace(model, nbytes=256), "the buffer has 256 bytes"),
        (lambda model: msgspec.structs.replace(model, alignment=0), "an alignment of 0"),
        (lambda model: msgspec.structs.replace(model, format="awex-manifest/2"), "this release reads"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    spoil: Callable[[MemoryMap], MemoryMap], complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / "m.json"
    file.write_bytes(msgspec.json.encode(spoil(map_memory(TENSORS))))
    with pytest.raises(LayoutError, match=complaint):
        read_map(file)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"format": "awex-manifest/1"}', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_manifest_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_bytes(content)
    with pytest.raises(LayoutError, match="is no manifest"):
        read_map(tmp_path / "m.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_map(tmp_path / "none.json")


def test_the_schema_is_that_of_the_files() -> None:
    expected = msgspec.json.schema(MemoryMap) | {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    assert json.loads(SCHEMA.read_text()) == expected, (
        "write msgspec.json.schema(MemoryMap) to docs/manifest.schema.json"
    )


def test_a_model_of_the_hubs_local_cache_is_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "hub" / "models--org--tiny"
    (kept / "snapshots").mkdir(parents=True)
    folder.rename(kept / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert cli.main(["export", "--model", "org/tiny", "--output", str(tmp_path / "m.json")]) == 0
    assert "5 tensors" in capsys.readouterr().out
