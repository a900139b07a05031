"""The files in deploy/ are well formed, and every path, port, flag, variable and probe in them is in the code."""

from __future__ import annotations

import configparser
import fnmatch
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import kubernetes_validate
import pytest
import yaml

from onepass.config import ENVIRONMENT_PREFIX, Config
from server import ROUTES, WRITE_GRACE_S
from tests.support import ROOT
from tests.support.live import Server
from tests.support.variables import VARIABLES

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
KUBERNETES_VERSION = "1.34"


def instructions() -> list[tuple[str, str]]:
    """(instruction, its arguments) of the Dockerfile, continuation lines joined."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def image_environment() -> dict[str, str]:
    return dict(item.split("=", 1) for rest in of("ENV") for item in shlex.split(rest))


def image_files() -> list[tuple[str, Path]]:
    """(path in the image, file here) of what COPY takes."""
    found = []
    for rest in of("COPY"):
        *sources, target = shlex.split(rest)
        for source in sources:
            paths = [path for path in ROOT.glob(source.rstrip("/")) if path.exists()]
            assert paths, f"COPY {source}"
            for path in paths:
                if path.is_dir():
                    found += [(f"{target}{file.relative_to(path)}", file) for file in path.rglob("*") if file.is_file()]
                else:
                    found.append((f"{target}{path.name}" if target.endswith("/") else target, path))
    return found


def test_the_dockerfile_passes_its_linter() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    found = subprocess.run([linter, "--no-color", "-"], input=DOCKERFILE, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_both_variants_install_from_our_own_lists() -> None:
    (choice,) = (rest for rest in of("RUN") if rest.startswith("case"))
    branches = dict(re.findall(r"(\w+)\)\s*(.*?)\s*;;", choice))
    assert set(branches) == {"cpu", "cuda"}
    assert "-r requirements.txt" in branches["cpu"]
    assert "requirements-cuda" not in branches["cpu"]
    assert "-r requirements.txt -r requirements-cuda.txt" in branches["cuda"]
    assert "VARIANT=cpu" in of("ARG")
    script = choice.replace("pip install", "echo").replace("apt-get", "true").replace("rm -rf", "true")
    for variant, code in (("cpu", 0), ("cuda", 0), ("tpu", 1)):
        found = subprocess.run(["sh", "-c", script], env={"VARIANT": variant}, capture_output=True, text=True)
        assert found.returncode == code
        assert ("-r requirements.txt" in found.stdout) == (code == 0)


def test_the_image_runs_as_nobody_in_particular_on_the_servers_port() -> None:
    (user,) = of("USER")
    assert all(int(number) > 0 for number in user.split(":"))
    environment = image_environment()
    assert {name for name in environment if name.startswith(ENVIRONMENT_PREFIX)} <= VARIABLES
    assert of("EXPOSE") == [environment["ONEPASS_PORT"]] == [str(Config().port)]
    (python,) = re.findall(r"^ARG PYTHON_VERSION=3\.(\d+)$", DOCKERFILE, re.MULTILINE)
    assert int(python) >= 11


def test_what_is_copied_passes_the_ignore_file_and_nothing_else_does() -> None:
    """The last pattern that matches a file or a folder above it decides, as for Docker, whose `*` stops at a slash."""
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]

    def is_sent(name: str) -> bool:
        sent = True
        for pattern in patterns:
            bare = pattern.removeprefix("!").rstrip("/")
            places = [str(place) for place in (PurePosixPath(name), *PurePosixPath(name).parents)]
            if any(fnmatch.fnmatch(place, bare) and place.count("/") == bare.count("/") for place in places[:-1]):
                sent = pattern.startswith("!")
        return sent

    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    copied = {file.relative_to(ROOT).as_posix() for _, file in image_files()}
    assert {name for name in tracked if is_sent(name)} == copied & set(tracked)


def test_the_image_holds_all_that_it_takes_to_serve(tmp_path: Path) -> None:
    """The copied files alone, with the image's variables: they serve every page, are found healthy, stop, change nothing."""
    for name, file in image_files():
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    home = tmp_path.parent / "home"
    home.mkdir(exist_ok=True)
    environment = image_environment() | {"ONEPASS_HOST": "127.0.0.1", "ONEPASS_PORT": port, "HOME": str(home)}
    command = json.loads(of("CMD")[0])
    assert json.loads(of("ENTRYPOINT")[0]) == ["python"]
    with Server(env=environment, command=command, cwd=tmp_path) as server:
        assert server.port == int(port)
        check = json.loads(of("HEALTHCHECK")[0].partition("CMD ")[2])
        subprocess.run([sys.executable, *check[1:]], env=environment, check=True, timeout=30)
        for path, route in ROUTES.items():
            if route.method == "GET":
                assert server.request("GET", path)[0] == 200, path
        status, _ = server.post({"state": "x", "questions": {"q": {"type": "noul", "instructions": "?"}}})
        assert status == 200
        server.process.send_signal(getattr(signal, of("STOPSIGNAL")[0]))
        assert server.process.wait(60) == 0
    dead = subprocess.run([sys.executable, *check[1:]], env=environment, capture_output=True, timeout=30)
    assert dead.returncode != 0
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before


def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, comment_prefixes=("#",), delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "onepass.service")
    return parser


def test_the_unit_starts_the_server_and_waits_for_its_drain() -> None:
    service = unit()["Service"]
    python, *command = shlex.split(service["ExecStart"])
    assert python == f"{service['WorkingDirectory']}/.venv/bin/python"
    assert (ROOT / command[0]).is_file()
    assert int(service["TimeoutStopSec"]) >= Config().drain_s + WRITE_GRACE_S
    text = (DEPLOY / "onepass.service").read_text()
    variables = set(re.findall(r"^Environment=(ONEPASS_\w+)=", text, re.MULTILINE))
    assert variables == {"ONEPASS_API_KEY_FILE"}
    assert variables <= VARIABLES
    name, _, source = service["LoadCredential"].partition(":")
    assert f"Environment=ONEPASS_API_KEY_FILE=%d/{name}" in text
    assert source == "/etc/onepass/keys"
    assert int(service["LimitNOFILE"]) > Config().max_connections
    assert "MemoryDenyWriteExecute" not in service


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_unit_passes_systemds_own_checks(tmp_path: Path) -> None:
    text = (DEPLOY / "onepass.service").read_text()
    copy = tmp_path / "onepass.service"
    copy.write_text(text.replace("/opt/onepass/.venv/bin/python", sys.executable).replace("/opt/onepass", str(ROOT)))
    found = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", copy]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout[-500:]


def objects() -> dict[str, Any]:
    return {item["kind"]: item for item in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def test_the_manifest_is_valid_for_kubernetes() -> None:
    assert set(objects()) == {"Deployment", "Service", "PodDisruptionBudget"}
    for item in objects().values():
        kubernetes_validate.validate(item, KUBERNETES_VERSION, strict=True)
    broken = objects()["Deployment"]
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["periodSeconds"] = "ten"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES_VERSION, strict=True)


def test_the_pods_probes_ports_and_times_are_the_servers() -> None:
    pod = objects()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    port = container["ports"][0]
    assert port["containerPort"] == Config().port
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": port["name"]}
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": port["name"]}
    assert {"/readyz", "/livez"} <= set(ROUTES)
    assert objects()["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    environment = {item["name"]: item for item in container["env"]}
    assert set(environment) <= VARIABLES
    assert environment["ONEPASS_PORT"]["value"] == str(Config().port)
    (program, seconds) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    assert pod["terminationGracePeriodSeconds"] >= int(seconds) + Config().drain_s + WRITE_GRACE_S + 5


def test_the_pod_may_do_no_more_than_it_must() -> None:
    pod = objects()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["enableServiceLinks"] is False  # else ONEPASS_PORT=tcp://… and more for a service of this name
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" == of("USER")[0]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == [image_environment()["HOME"]]


def test_labels_and_names_hang_together() -> None:
    deployment, service, budget = (objects()[kind] for kind in ("Deployment", "Service", "PodDisruptionBudget"))
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    assert budget["spec"]["selector"]["matchLabels"] == labels
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(Config().port)
    assert annotations["prometheus.io/path"] in ROUTES
