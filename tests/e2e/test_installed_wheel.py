"""A wheel in an environment of its own, and what a folder called agent/ elsewhere can do to it."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def run(*argv: str | Path, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(arg) for arg in argv], cwd=cwd, env=CLEAN | extra, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    done = run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", out, ROOT, cwd=out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("laggard-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv with the wheel; the dependencies are those of the running environment."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    done = run(
        sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel,
        cwd=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    site = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home
    ).stdout.strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A user's repository with an agent/ folder that says so when it is imported."""
    for package in ("agent", "probes", "collectives"):
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").write_text(f"raise SystemExit('hijacked by {package}')\n")
    (tmp_path / "sitewide_torch_stand_in.py").write_text("")
    return tmp_path


VERSION = f"laggard, version {__import__('agent').__version__}\n"


def test_console_script(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "bin" / "laggard", "--version", cwd=tmp_path).stdout == VERSION


@pytest.mark.parametrize("in_folder", [False, True], ids=["elsewhere", "in-the-folder"])
@pytest.mark.parametrize("on_path", [False, True], ids=["no-pythonpath", "pythonpath"])
@pytest.mark.parametrize("as_module", [False, True], ids=["script", "python-m"])
def test_a_folder_called_agent_does_not_take_over(
    installed: Path,
    hostile: Path,
    in_folder: bool,
    on_path: bool,
    as_module: bool,
    tmp_path_factory,
) -> None:
    python, script = installed / "bin" / "python", installed / "bin" / "laggard"
    argv = [python, "-m", "laggard"] if as_module else [script]
    cwd = hostile if in_folder else tmp_path_factory.mktemp("elsewhere")
    extra = {"PYTHONPATH": str(hostile)} if on_path else {}
    done = run(*argv, "explain", cwd=cwd, **extra)
    assert (done.returncode, done.stderr) == (0, "")
    assert "pcie." in done.stdout


def test_what_pythonpath_hands_over_stays_reachable(installed: Path, hostile: Path) -> None:
    program = (
        "import laggard; laggard._pin(); import sitewide_torch_stand_in, agent; "
        "print(agent.__file__)"
    )
    python = installed / "bin" / "python"
    done = run(python, "-c", program, cwd=hostile, PYTHONPATH=str(hostile))
    assert str(installed) in done.stdout, done.stderr


def test_pip_target_with_pythonpath(wheel: Path, hostile: Path, tmp_path_factory) -> None:
    target = tmp_path_factory.mktemp("target")
    done = run(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel,
        cwd=target,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join((str(hostile), str(target)))
    done = run(sys.executable, "-m", "laggard", "--version", cwd=hostile, PYTHONPATH=path)
    assert done.stdout == VERSION, done.stderr


def test_doctor_tells_of_a_distribution_that_claims_our_folder(
    installed: Path, tmp_path: Path
) -> None:
    stranger = tmp_path / "collectives-0.0.1.dist-info"
    stranger.mkdir()
    (stranger / "METADATA").write_text("Metadata-Version: 2.1\nName: collectives\nVersion: 0.0.1\n")
    (stranger / "RECORD").write_text(
        "collectives/__init__.py,,\ncollectives-0.0.1.dist-info/RECORD,,\n"
    )
    script = installed / "bin" / "laggard"
    done = run(script, "doctor", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "LOOK  package collectives: also installed by collectives" in done.stdout
    assert "uninstalling it deletes our files" in done.stdout
    assert done.returncode == 1


def test_doctor_names_a_folder_that_would_shadow_ours(installed: Path, hostile: Path) -> None:
    done = run(installed / "bin" / "laggard", "doctor", cwd=hostile)
    assert f"(not the one in {hostile})" in done.stdout


def test_the_wheel_holds_what_it_should(wheel: Path) -> None:
    import zipfile

    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    version = __import__("agent").__version__
    assert tops == {
        "agent", "probes", "collectives", "laggard.py",
        f"laggard-{version}.dist-info", f"laggard-{version}.data",
    }  # fmt: skip
    assert {f"{package}/py.typed" for package in ("agent", "probes", "collectives")} <= set(names)
    shared = {name.split(".data/data/")[1] for name in names if ".data/data/" in name}
    assert shared == {
        "share/man/man1/laggard.1",
        "share/bash-completion/completions/laggard",
        "share/zsh/site-functions/_laggard",
        "share/fish/vendor_completions.d/laggard.fish",
    }
