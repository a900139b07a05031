"""Finding and verifying a checkpoint: what starts, what refuses to, and what it says."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from onepass import checkpoint
from onepass.checkpoint import check_unchanged, open_checkpoint, read_manifest, weight_files
from onepass.config import Config
from onepass.errors import StartupError
from tests.support.checkpoints import STARTER


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint as far as this module can tell."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sums(folder: Path) -> list[str]:
    return [f"{digest(path)}  {path.name}" for path in sorted(folder.iterdir()) if path.name != "SHA256SUMS"]


def refusal(folder: Path | str, **settings: bool) -> str:
    with pytest.raises(StartupError) as caught:
        open_checkpoint(Config(model=str(folder), **settings))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_shipped_model_is_verified_by_the_top_level_manifest() -> None:
    found = open_checkpoint(Config())
    assert found.is_verified
    assert found.source == "starter"
    assert found.digests is not None
    assert found.digests["model/model.safetensors"] == digest(STARTER / "model.safetensors")


def test_the_shipped_model_is_not_loaded_without_its_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starter = Path(shutil.copytree(STARTER, tmp_path / "model"))
    monkeypatch.setattr(checkpoint, "STARTER_MODEL", starter)
    assert "is missing" in refusal(starter)


def test_without_a_manifest_nothing_is_verified_unless_one_is_required(folder: Path) -> None:
    assert open_checkpoint(Config(model=str(folder))).is_verified is None
    assert "--require-manifest" in refusal(folder, require_manifest=True)


@pytest.mark.parametrize("name", ["SHA256SUMS", "weights.sha256"])
@pytest.mark.parametrize(
    "rewrite",
    [
        lambda text: text,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("  ", " *"),
        lambda text: text.replace("  ", "  ./"),
        lambda text: "\n\n" + text + "\n \n",
        lambda text: "".join(line[:64].upper() + line[64:] for line in text.splitlines(keepends=True)),
    ],
)
def test_manifests_as_tools_write_them_are_read(folder: Path, name: str, rewrite: object) -> None:
    assert callable(rewrite)
    (folder / name).write_bytes(rewrite("\n".join(sums(folder)) + "\n").encode())
    assert open_checkpoint(Config(model=str(folder))).is_verified is True


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0" * 64 + "  model.safetensors", "SHA256SUMS:2: model.safetensors does not have this SHA-256"),
        ("0" * 64 + "  gone.json", "SHA256SUMS:2: gone.json is missing"),
        ("0" * 64 + "  ../x", "SHA256SUMS:2: '../x' is not a file below this folder"),
        ("0" * 64 + "  a/../../x", "SHA256SUMS:2: 'a/../../x' is not a file below this folder"),
        ("0" * 64 + "  /etc/passwd", "SHA256SUMS:2: '/etc/passwd' is not a file below this folder"),
        ("0" * 64 + "  C:\\x", "is not a file below this folder"),
        ("0" * 64, "SHA256SUMS:2: must be a SHA-256 in hex, two blanks and a file name"),
        ("0" * 63 + "  config.json", "SHA256SUMS:2: must be a SHA-256 in hex"),
        ("# a comment", "SHA256SUMS:2: must be a SHA-256 in hex"),
    ],
)
def test_a_bad_line_is_named(folder: Path, line: str, message: str) -> None:
    (folder / "SHA256SUMS").write_text(f"{digest(folder / 'config.json')}  config.json\n{line}\n")
    if "model.safetensors" not in line:
        (folder / "model.safetensors").rename(folder / "model.weights")  # otherwise it is unlisted
    assert message in refusal(folder)


def test_a_file_listed_twice_an_empty_manifest_and_an_unlisted_file_refuse(folder: Path) -> None:
    manifest = folder / "SHA256SUMS"
    manifest.write_text("\n".join([*sums(folder), sums(folder)[0].replace("  ", "  ./")]))
    assert "is listed twice" in refusal(folder)
    manifest.write_text("\n")
    assert "lists no file" in refusal(folder)
    manifest.write_bytes(b"\xff")
    assert "is not UTF-8" in refusal(folder)
    manifest.unlink()
    manifest.write_text("\n".join(sums(folder)))
    (folder / "sub").mkdir()
    (folder / "sub" / "more.safetensors").write_bytes(b"x")
    assert "sub/more.safetensors could be loaded but is not listed" in refusal(folder)
    shutil.rmtree(folder / "sub")
    (folder / "photo.png").write_bytes(b"x")  # nothing loads it
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.json").write_text("{}")
    assert open_checkpoint(Config(model=str(folder))).is_verified is True


def test_a_changed_file_is_found_whatever_changed_in_it(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text("\n".join(sums(folder)))
    (folder / "model.safetensors").write_bytes(b"weightz")
    assert "model.safetensors does not have this SHA-256" in refusal(folder)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", "there is no such folder"),
        ("/nowhere", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
        (__file__, "is a file; a checkpoint is a folder"),
        ("nobody/nothing", "no such folder, and the Hub cannot be reached"),
    ],
)
def test_a_missing_model_is_one_line(model: str, message: str) -> None:
    assert message in refusal(model)


def test_weights_are_safetensors_of_this_folder_only(folder: Path) -> None:
    assert weight_files(folder) == [folder / "model.safetensors"]
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "weights are loaded from safetensors files only" in refusal(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}}))
    assert weight_files(folder) == [folder / "a.safetensors"]
    for name in ("../a.safetensors", "/etc/x", 5):
        index.write_text(json.dumps({"weight_map": {"x": name}}))
        assert "which is not a file of this folder" in refusal(folder)
    index.write_text("[]")
    assert "is not an index" in refusal(folder)


def test_a_manifest_that_cannot_be_read_is_not_passed_over(folder: Path) -> None:
    (folder / "SHA256SUMS").symlink_to("/nowhere")
    assert "SHA256SUMS cannot be read" in refusal(folder)
    (folder / "SHA256SUMS").unlink()
    (folder / "SHA256SUMS").mkdir()
    assert "SHA256SUMS cannot be read" in refusal(folder)


@pytest.mark.parametrize("text", ["[]", "{", "\ufeff{}"])
def test_a_configuration_must_be_an_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json must hold a JSON object" in refusal(folder)


def test_a_folder_without_a_configuration_is_not_a_checkpoint(tmp_path: Path) -> None:
    assert "it has no config.json" in refusal(tmp_path)


def test_a_hub_snapshot_is_found_in_the_cache_with_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """No Hub can be reached in the tests: the cache is laid out by hand, as the Hub's library does."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--some--model"
    snapshot = repo / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    snapshot.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, snapshot / name)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    found = open_checkpoint(Config(model="some/model"))
    assert (found.source, found.revision, found.name, found.is_verified) == ("hub", commit, "some/model", None)


def test_a_manifest_without_a_last_newline_is_read(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text(f"{'A' * 64}  x")
    assert read_manifest(folder / "SHA256SUMS") == {"x": (1, "a" * 64)}


@pytest.mark.parametrize("change", ["replaced", "written", "removed", "touched"])
def test_a_file_that_changes_between_hashing_and_loading_stops_the_start(folder: Path, change: str) -> None:
    (folder / "SHA256SUMS").write_text("\n".join(sums(folder)))
    found = open_checkpoint(Config(model=str(folder)))
    check_unchanged(found)
    path = folder / "model.safetensors"
    if change == "replaced":
        other = folder / "other"
        other.write_bytes(b"weights")
        other.replace(path)
    elif change == "written":
        path.write_bytes(b"WEIGHTS")
    elif change == "removed":
        path.unlink()
    else:
        os.utime(path)
    with pytest.raises(StartupError, match="safetensors changed between its verification and its loading"):
        check_unchanged(found)
