"""This module finds a checkpoint (a folder, or a snapshot from the Hub) and verifies it before anything is loaded.

It knows files and digests, and nothing of what they mean. The Hub libraries are imported only for a Hub repository.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm import tqdm

from onepass.config import STARTER_MODEL, Config
from onepass.errors import StartupError
from onepass.families.markers import UNMARKED, Family, identify, read_object

STARTER_NAME = "onepass-starter"
MANIFEST_NAMES = ("SHA256SUMS", "weights.sha256")
WEIGHTS_INDEX = "model.safetensors.index.json"
# A loader of the Hugging Face library might read files with these endings. If there is a manifest, it must list all of
# them. Code is left out here, since it is never run and published manifests do not list it.
LOADABLE = frozenset(
    [
        ".safetensors",
        ".json",
        ".jinja",
        ".txt",
        ".model",
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".h5",
        ".msgpack",
        ".gguf",
        ".onnx",
        ".spm",
        ".tiktoken",
    ]
)
DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*head*.pt", "blink.py", *MANIFEST_NAMES)
# In a subfolder, loaders read files with these names. They do not read the records of an evaluation.
_CONFIGURATION = re.compile(r".*(config|token|vocab|merges|index|added|special).*", re.IGNORECASE)
HASH_CHUNK_BYTES = 4 << 20
_LINE = re.compile(r"([0-9A-Fa-f]{64}) [ *](.+)")


Stamp = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """This is a checkpoint on this disk. Its files may be loaded after `verify`."""

    folder: Path
    name: str
    source: str  # It is "starter", "folder" or "hub".
    revision: str | None  # This is the commit of a Hub snapshot.
    created: int  # Its configuration was written on this disk at this time, in seconds since 1970.
    manifest: Path | None = None
    stamps: dict[str, Stamp] = field(default_factory=dict)  # The manifest's files get these before they are hashed.
    digests: dict[str, str] | None = None  # It maps files to SHA-256 in hex, after they were found to match.
    config: dict[str, Any] = field(default_factory=dict)  # This is config.json, read after its stamp was taken.
    family: Family = UNMARKED

    @property
    def is_verified(self) -> bool | None:
        """Return True, or None without a manifest. A checkpoint that does not match its manifest is never returned."""
        return None if self.digests is None else True

    @property
    def text_config(self) -> dict[str, Any]:
        """Return the configuration of the text model, which is a part of config.json or all of it."""
        text: dict[str, Any] = self.config.get("text_config") or self.config
        return text


def set_hub_environment(config: Config) -> None:
    """Set the Hub libraries offline for a local folder. Call this before anything imports them: they look only once."""
    if Path(config.model).is_dir():
        os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"


def open_checkpoint(config: Config) -> Checkpoint:
    """Find and verify the checkpoint. Raises `StartupError` with one line that names the file or line at fault."""
    return verify(find_checkpoint(config))


def find_checkpoint(config: Config) -> Checkpoint:
    """Find the checkpoint without hashing it. It must be verified before it is loaded. Raises `StartupError`."""
    folder = Path(config.model)
    source, revision, name = "folder", None, folder.name
    if config.is_starter:
        source, name = "starter", STARTER_NAME
    if not folder.is_dir():
        folder = _download(config)
        source, revision, name = "hub", folder.name, config.model
    folder = folder.resolve() if source != "hub" else folder
    family = identify(folder, config.family)
    configuration = folder / "config.json"
    if not configuration.is_file():
        raise StartupError(f"--model {folder} is not a checkpoint: it has no config.json")
    manifest = _find_manifest(folder, config)
    stamps = {}
    if manifest is not None:
        listed = read_manifest(manifest)
        _check_unlisted(folder, manifest, listed)
        stamps = _stamp_listed(manifest, listed)
    contents = _read_configuration(configuration)  # Its stamp was taken before, so a later change is found.
    weight_files(folder)
    name, created = config.served_name or name or folder.name, int(configuration.stat().st_mtime)
    return Checkpoint(folder, name, source, revision, created, manifest, stamps, config=contents, family=family)


def verify(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its digests, if it has a manifest. Any thread may call this. Raises `StartupError`."""
    if checkpoint.manifest is None:
        return checkpoint
    return replace(checkpoint, digests=_hash_files(checkpoint.manifest, checkpoint.stamps))


def check_unchanged(checkpoint: Checkpoint) -> None:
    """Check that the loaded files are the ones that were hashed. Call this after loading. Raises `StartupError`."""
    for name, stamp in checkpoint.stamps.items():
        assert checkpoint.manifest is not None
        path = checkpoint.manifest.parent / name
        if _stamp(path) != stamp:
            raise StartupError(f"{path} changed between its verification and its loading")


def _read_configuration(path: Path) -> dict[str, Any]:
    contents = read_object(path)
    if not isinstance(contents.get("text_config") or {}, dict):
        raise StartupError(f"{path}: text_config must be a JSON object")
    return contents


def _download(config: Config) -> Path:
    if Path(config.model).exists():
        raise StartupError(f"--model {config.model} is a file; a checkpoint is a folder")
    if config.model.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", config.model):
        raise StartupError(f"--model {config.model}: there is no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    where = f"--model {config.model}" + (f" --revision {config.revision}" if config.revision else "")
    try:
        return Path(snapshot_download(config.model, revision=config.revision or None, allow_patterns=list(DOWNLOADED)))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise StartupError(f"{where}: no such folder, and the Hub cannot be reached") from None
    except HfHubHTTPError as err:
        raise StartupError(f"{where}: no such folder, and the Hub answers: {str(err).splitlines()[0]}") from None
    except (OSError, ValueError) as err:
        raise StartupError(f"{where}: no such folder, and no download: {str(err).splitlines()[0]}") from None


def _find_manifest(folder: Path, config: Config) -> Path | None:
    if folder == STARTER_MODEL:
        manifest = STARTER_MODEL.parent / MANIFEST_NAMES[0]
        if not manifest.is_file():
            raise StartupError(f"{manifest} is missing: the shipped model is not loaded without it")
        return manifest
    for name in MANIFEST_NAMES:
        if os.path.lexists(folder / name):  # A manifest that cannot be read is refused, not ignored.
            return folder / name
    if config.require_manifest:
        raise StartupError(f"--require-manifest: {folder} has neither {' nor '.join(MANIFEST_NAMES)}")
    return None


def read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Read lines of `sha256sum` as name -> (line number, hex digest). Names are relative to the manifest's folder.

    CRLF, `*name`, capitals and blank lines are allowed. A name that could name a file twice, or a file outside the
    folder, is refused. Raises `StartupError`.
    """
    try:
        lines = path.read_bytes().decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise StartupError(f"{path} is not UTF-8 text") from None
    except OSError as err:
        raise StartupError(f"{path} cannot be read: {err.strerror}") from None
    listed: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise StartupError(f"{path}:{number}: must be a SHA-256 in hex, two blanks and a file name")
        name = str(PurePosixPath(match[2]))
        if name.startswith("/") or ".." in PurePosixPath(name).parts or "\\" in name or ":" in name:
            raise StartupError(f"{path}:{number}: {name!r} is not a file below this folder")
        if name in listed:
            raise StartupError(f"{path}:{number}: {name!r} is listed twice")
        listed[name] = (number, match[1].lower())
    if not listed:
        raise StartupError(f"{path} lists no file")
    return listed


def _check_unlisted(folder: Path, manifest: Path, listed: dict[str, tuple[int, str]]) -> None:
    for path in _loadable_files(folder):
        name = path.relative_to(manifest.parent).as_posix()
        if name not in listed:
            raise StartupError(f"{manifest}: {name} could be loaded but is not listed")


def _loadable_files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))  # This skips .git and .cache.
        for name in sorted(names):
            path = Path(root, name)
            suffix = path.suffix.lower()
            is_record = suffix in (".json", ".txt") and path.parent != folder and not _CONFIGURATION.fullmatch(name)
            if suffix in LOADABLE and not is_record:
                yield path


def _stamp(path: Path) -> Stamp | None:
    """Return which file is there now, as far as the file system tells: its number, its size, and its last changes."""
    if not path.is_file():
        return None
    facts = path.stat()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _stamp_listed(manifest: Path, listed: dict[str, tuple[int, str]]) -> dict[str, Stamp]:
    stamps = {}
    for name, (number, _) in listed.items():
        stamp = _stamp(manifest.parent / name)
        if stamp is None:
            raise StartupError(f"{manifest}:{number}: {name} is missing")
        stamps[name] = stamp
    return stamps


def _hash_files(manifest: Path, stamps: dict[str, Stamp]) -> dict[str, str]:
    """Hash every file, check that it has its listed digest, and return the digests. Raises `StartupError`."""
    listed = read_manifest(manifest)
    num_bytes = sum(size for _, size, _, _ in stamps.values())
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="verifying", leave=False, disable=None) as bar:
        for name, (number, digest) in listed.items():
            if _sha256(manifest.parent / name, bar) != digest:
                raise StartupError(
                    f"{manifest}:{number}: {name} does not have this SHA-256; it was changed or cut short"
                )
    return {name: digest for name, (_, digest) in listed.items()}


def _sha256(path: Path, bar: tqdm) -> str:
    digest = hashlib.sha256()
    chunk = bytearray(HASH_CHUNK_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(chunk):
                digest.update(memoryview(chunk)[:count])
                bar.update(count)
    except OSError as err:
        raise StartupError(f"{path} cannot be read: {err.strerror}") from None
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the model, each inside `folder`. Raises `StartupError` if there are none."""
    index = folder / WEIGHTS_INDEX
    names = ["model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StartupError(f"{index} is not an index of safetensors files") from None
    for name in names:
        if not isinstance(name, str) or name != os.path.basename(name):
            raise StartupError(f"{index} names {name!r}, which is not a file of this folder")
        if not (folder / name).is_file():
            raise StartupError(f"{folder} has no {name}; weights are loaded from safetensors files only")
    return [folder / name for name in names]
