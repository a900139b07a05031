"""The command `doctor` checks step by step whether this machine can serve, and says what to do if it cannot.

It must run when nothing else runs. It therefore imports a package that may be missing only after it has looked for it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from onepass import find_shipped
from onepass.config import SERVICE_LINK, Config
from onepass.errors import StartupError

if TYPE_CHECKING:
    from onepass.checkpoint import Checkpoint
    from onepass.decider import Decider

INSTALL = "python -m pip install -r {}"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LIBRARIES_BYTES = 760 << 20  # The process with the starter takes 762 MiB (torch 2.14 on a CPU), mostly for libraries.
LOADING_FACTOR = 1.33  # This is the peak memory while loading, divided by that of the weights (docs/engine.md).
MIN_FILES = 1024
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_REQUIREMENT = re.compile(r'([A-Za-z0-9._-]+)(?:\[.*\])?==([^;\s]+)(?:\s*;\s*python_version\s*<\s*"(\d+)\.(\d+)")?')

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Status
    found: str
    advice: str = ""  # It says what to do.


def run(make_config: Callable[[], Config], open_decider: Callable[[Config], Decider] | None) -> list[Check]:
    """Run all checks, in the order in which failures should be repaired.

    `open_decider` loads the model, which is then asked a question. Without it, this check is left out.
    """
    checks = [check_python(), *check_packages("requirements.txt")]
    has_packages = not any(check.status == "fail" for check in checks)
    try:
        config = make_config()
    except StartupError as err:
        return [*checks, Check("settings", "fail", str(err), "change the flag, or the variable ONEPASS_… of its name")]
    listening = check_socket(config.uds) if config.uds else check_port(config)
    checks += [check_variables(os.environ), listening, check_key(config), check_files(config)]
    if not has_packages:
        return [*checks, Check("model", "skip", "not looked at: packages are missing")]
    from onepass.loading import set_environment

    set_environment(config)
    os.environ["HF_HUB_OFFLINE"] = "1"  # A check downloads nothing.
    of_files, checkpoint = check_checkpoint(config)
    of_model = [*check_device(config), of_files]
    if checkpoint is not None and all(check.status != "fail" for check in of_model):
        dtype, choice = check_dtype(config, checkpoint)
        of_model += [check_family(checkpoint), dtype, check_memory(config, checkpoint.folder, choice)]
    if open_decider is not None:
        can_load = checkpoint is not None and all(check.status != "fail" for check in of_model)
        skipped = Check("answer", "skip", "not tried: see above")
        of_model.append(check_answer(config, open_decider) if can_load else skipped)
    return checks + of_model


def check_python() -> Check:
    """Report the Python. `onepass/__main__.py` has checked its version, since an older one cannot read these files."""
    return Check("python", "ok", f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}")


def read_requirements(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (package, version) for each line that applies to this Python. Raises `ValueError` for any other line."""
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.split("#")[0].strip()
        if line and not line.startswith("-r "):
            match = _REQUIREMENT.fullmatch(line)
            if match is None:
                raise ValueError(f"{path.name}: {line!r} is not NAME==VERSION")
            if match[3] is None or sys.version_info < (int(match[3]), int(match[4])):
                yield match[1], match[2]


def check_packages(file: str) -> list[Check]:
    """Return one check for all packages that are right, and one check for each package that is not."""
    install = INSTALL.format(file)
    checks, num_right = [], 0
    for name, wanted in read_requirements(find_shipped(file)):
        try:
            found = version(name)
        except PackageNotFoundError:
            checks.append(Check(f"package {name}", "fail", f"missing; {wanted} is needed", install))
            continue
        if found.split("+")[0] == wanted:  # The version 2.14.1+cpu counts as 2.14.1.
            num_right += 1
        else:
            checks.append(Check(f"package {name}", "warn", f"{found}; tested with {wanted}", install))
    return [Check("packages", "ok", f"{num_right} of {file} are there in the tested version"), *checks]


def check_variables(environ: Mapping[str, str]) -> Check:
    """Check the variables of settings that already fit together."""
    if any(SERVICE_LINK.fullmatch(f"{name}={value}") for name, value in environ.items()):
        found = "they fit together; ONEPASS_… variables that Kubernetes made for a service are passed over"
        return Check("settings", "warn", found, "set enableServiceLinks: false in the pod")
    return Check("settings", "ok", "they fit together")


def check_socket(path: str) -> Check:
    folder = Path(path).parent
    if not os.access(folder, os.W_OK | os.X_OK):
        return Check("socket", "fail", f"{path}: no socket can be made in {folder}", "make the folder, or own it")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError) as err:  # A refused one is left by a killed server.
            if os.path.lexists(path) and not Path(path).is_socket():
                return Check("socket", "fail", f"{path} is there and is not a socket", "give another --uds")
            return Check("socket", "ok", f"{path} is free" if err.errno == errno.ENOENT else f"{path} is stale")
        except OSError as err:  # A name of more than 107 bytes also raises this.
            return Check("socket", "fail", f"{path}: {err.strerror or err}", "give another --uds")
    return Check("socket", "fail", f"{path}: a process listens there", "stop it, or give another --uds")


def check_port(config: Config) -> Check:
    name = f"port {config.port}"
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((config.host, config.port))
    except OSError as err:
        advice = "stop what listens there, or give another --port (0 picks a free one)"
        if isinstance(err, socket.gaierror) or err.errno == errno.EADDRNOTAVAIL:
            advice = "give an address of this machine as --host; 0.0.0.0 listens on all"
        elif isinstance(err, PermissionError):
            advice = "ports below 1024 need a right: give a higher --port"
        return Check(name, "fail", f"{config.host}:{config.port}: {err.strerror}", advice)
    return Check(name, "ok", f"free on {config.host}")


def check_key(config: Config) -> Check:
    if config.api_keys:
        return Check("key", "ok", f"{len(config.api_keys)} accepted")
    if config.uds or config.host in LOOPBACK:
        return Check("key", "ok", "none; only this machine reaches the server")
    return Check(
        "key", "warn", f"none, and {config.host} can be reached from outside", "set ONEPASS_API_KEY or --api-key-file"
    )


def check_files(config: Config) -> Check:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = config.max_connections + MIN_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        return Check(
            "open files",
            "warn",
            f"at most {hard}, and --max-connections is {config.max_connections}",
            f"raise the hard limit (ulimit -Hn) to {needed}",
        )
    return Check("open files", "ok", "unlimited" if hard == resource.RLIM_INFINITY else f"at most {hard}")


def check_device(config: Config) -> list[Check]:
    """Check the device and its kernels."""
    import torch

    from onepass.forward.load import choose_device

    try:
        device = choose_device(config.device)
    except StartupError as err:
        advice = "see that nvidia-smi lists a GPU and that torch is not a CPU build, or use --device cpu"
        return [Check("device", "fail", str(err), advice)]
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
        return [Check("device", "ok", name), *check_packages("requirements-cuda.txt"), check_kernels()]
    capability = torch.backends.cpu.get_cpu_capability()
    return [Check("device", "ok", f"CPU, {torch.get_num_threads()} threads, {capability}")]


def check_dtype(config: Config, checkpoint: Checkpoint) -> tuple[Check, str]:
    """Compute a matrix product in the number format that would be used, and return the check and the format's name."""
    import torch

    from onepass.forward import tuning
    from onepass.forward.load import choose_device

    device = choose_device(config.device)
    choice = tuning.choose(checkpoint, device, config)
    name = str(choice.dtype).removeprefix("torch.")
    found = f"{name} on {device}: {choice.reasons['dtype']}"
    try:
        matrix = torch.ones((64, 64), device=device, dtype=choice.dtype)
        is_right = bool((matrix @ matrix == 64).all())
    except RuntimeError as err:
        is_right, found = False, f"{found}: {str(err).splitlines()[0]}"
    if not is_right:
        return Check("dtype", "fail", f"{found}, and it does not compute", "use --dtype float32"), name
    if device.type == "cpu" and name == "bfloat16" and not has_bfloat16(Path("/proc/cpuinfo")):
        advice = "use --dtype float32, unless memory is short"
        return Check("dtype", "warn", f"{found}; this CPU has no instructions for it", advice), name
    return Check("dtype", "ok", found), name


def has_bfloat16(cpuinfo: Path) -> bool:
    return cpuinfo.exists() and bool(re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", cpuinfo.read_text()))


def check_kernels() -> Check:
    try:
        import fla.ops.gated_delta_rule  # noqa: F401
    except Exception as err:  # A package may fail in any way when it is imported.
        reason = (str(err).splitlines() or [type(err).__name__])[0]
        return Check("kernels", "fail", f"flash-linear-attention: {reason}", INSTALL.format("requirements-cuda.txt"))
    return Check("kernels", "ok", "flash-linear-attention")


def check_checkpoint(config: Config) -> tuple[Check, Checkpoint | None]:
    """Check the checkpoint, and return it if it is on this disk."""
    from onepass.checkpoint import open_checkpoint
    from onepass.families.markers import FamilyRefused

    try:
        checkpoint = open_checkpoint(config)
    except FamilyRefused as err:
        advice = "name a checkpoint of a family that is served (docs/checkpoints.md)"
        return Check("family", "fail", str(err), advice), None
    except StartupError as err:
        if "cannot be reached" in str(err):
            return Check("checkpoint", "skip", f"{config.model} is not on this disk; the server will look online"), None
        return Check("checkpoint", "fail", str(err), "get the files again, or name another --model"), None
    if checkpoint.digests is None:
        advice = "write a SHA256SUMS beside the weights (docs/checkpoints.md)"
        return Check("checkpoint", "warn", f"{checkpoint.folder}: no manifest to verify it by", advice), checkpoint
    found = f"{checkpoint.name}: {len(checkpoint.digests)} files are as its manifest says"
    return Check("checkpoint", "ok", found), checkpoint


def check_family(checkpoint: Checkpoint) -> Check:
    """Say in which family's format the checkpoint is read."""
    family = checkpoint.family
    found = f"{family.name} {family.version}".strip()
    if family.name == "chat":
        how = "as --family says" if family.is_forced else "no file says how it decides"
        advice = "name a checkpoint that was trained to decide (docs/checkpoints.md) for answers to act on"
        return Check("family", "warn", f"{found}: {how}; the library's default prompt, no temperature", advice)
    return Check("family", "ok", found)


def check_memory(config: Config, folder: Path, dtype: str) -> Check:
    from onepass.checkpoint import weight_files
    from onepass.forward.load import choose_device

    device = choose_device(config.device)
    try:
        num_weights = sum(count_weights(path) for path in weight_files(folder))
    except (OSError, ValueError, LookupError, struct.error):
        return Check("memory", "fail", f"{folder}: the weights are no safetensors files", "get the files again")
    needed = int(num_weights * ITEM_BYTES[dtype] * LOADING_FACTOR) + (config.state_cache_mb << 20)
    if device.type == "cuda":
        import torch

        free, where = torch.cuda.mem_get_info()[0], "free on the GPU"
    else:
        needed += LIBRARIES_BYTES
        free, where = available_bytes(), "available"
    found = f"about {needed / 1e9:.1f} GB needed for {num_weights / 1e6:.0f} million weights, {free / 1e9:.1f} {where}"
    if needed > free:
        return Check("memory", "fail", found, "use a smaller model, --dtype bfloat16 or a lower --state-cache-mb")
    return Check("memory", "ok", found)


def count_weights(path: Path) -> int:
    """Count the weights of a safetensors file. Only its header is read."""
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    count = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            size = 1
            for length in tensor["shape"]:
                size *= length
            count += size
    return count


def available_bytes() -> int:
    """Return the memory that the machine or the container still has, in bytes."""
    meminfo = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
    free = int(meminfo["MemAvailable"]) << 10
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    with contextlib.suppress(OSError, ValueError):  # There is no cgroup v2, or the limit is "max".
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free


def check_answer(config: Config, open_decider: Callable[[Config], Decider]) -> Check:
    started = time.monotonic()
    try:
        with open_decider(config) as decider:
            loaded_s = time.monotonic() - started
            facts = decider.status().document()
            answer = decider.ask("The parcel is late.", {"late": {"type": "noul", "instructions": "Is it late?"}})
    except Exception as err:  # The server would stop with the same error, whatever a library raises.
        return Check("answer", "fail", str(err) or type(err).__name__, "the log above has the reason")
    found = f"loaded in {loaded_s:.1f} s on backend {facts['backend']}, answered in {answer['x_latency_ms']:.0f} ms"
    if not facts["warm_up"]["same_answer_twice"]:
        return Check("answer", "warn", f"{found}; the same question twice gave two answers", "use --dtype float32")
    return Check("answer", "ok", found)


def show(checks: list[Check], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps([asdict(check) for check in checks], ensure_ascii=False, indent=1) + "\n")
        return
    widest = max(len(check.name) for check in checks)
    for check in checks:
        sys.stdout.write(f"{check.status:4}  {check.name:{widest}}  {check.found}\n")
        if check.advice:
            sys.stdout.write(f"{'':{widest + 6}}  -> {check.advice}\n")
