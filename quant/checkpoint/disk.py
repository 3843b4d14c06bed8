"""Writing so that nothing half-written is ever found: temporary names, renames, and room checked beforehand."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def require_free_space(path: Path, *, num_bytes: int, what: str) -> None:
    """OSError, before anything is written, when the disk that will hold `path` has less room than `num_bytes`."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise OSError(f"{what}: needs {num_bytes / 1e6:.1f} MB at {path}; the disk has {free / 1e6:.1f} MB free. Free some space or write elsewhere.")


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A temporary directory beside `path` that becomes `path` when the block ends well, and is removed when it does not.

    Errors: FileExistsError when `path` exists; OSError from a full disk, after clean-up.
    """
    refuse_existing(path)
    created = _make_folders(path.parent)
    for stale in path.parent.glob(f".{path.name}.partial-*"):
        if not _is_alive(stale.name.rsplit("-", 1)[1]):
            print(f"removing {stale}, left by an export that was killed")
            shutil.rmtree(stale)
    partial = path.parent / f".{path.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        refuse_existing(path)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        _remove_folders(created)
        raise


@contextlib.contextmanager
def resumable_directory(path: Path, *, fingerprint: str, rank: int = 0, ranks: int = 1) -> Iterator[Path]:
    """A directory beside `path` whose finished files outlive a kill: the next call with the same fingerprint finds them.

    The caller renames it with `give_name`. One process a rank holds it. After an error of a single rank it is removed, as are those that
    a killed run of another fingerprint left; after an interrupt, or with several ranks, what is finished stays for the next call.
    Errors: FileExistsError when `path` exists, RuntimeError when another process writes it.
    """
    refuse_existing(path)
    created = _make_folders(path.parent)
    partial = path.parent / f".{path.name}.unfinished-{fingerprint[:12]}"
    if rank == 0:
        _remove_stale(path, keep=partial)
    partial.mkdir(exist_ok=True)
    with (partial / f".lock-{rank}").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RuntimeError(f"{partial}: another process is writing {path}. Wait for it, or stop it first.") from error
        try:
            yield partial
        except KeyboardInterrupt:
            raise
        except BaseException:
            if ranks == 1:
                shutil.rmtree(partial, ignore_errors=True)
                _remove_folders(created)
            raise


def give_name(partial: Path, path: Path) -> None:
    """The finished directory gets its name, and loses what was there for the writing only."""
    refuse_existing(path)
    for hidden in partial.glob(".*"):
        hidden.unlink()
    partial.rename(path)


def _make_folders(path: Path) -> list[Path]:
    """A folder with all above it; those that were not there, the innermost first."""
    created = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return created


def _remove_folders(created: list[Path]) -> None:
    for folder in created:
        with contextlib.suppress(OSError):   # someone else uses it by now
            folder.rmdir()


def _remove_stale(path: Path, *, keep: Path) -> None:
    """Directories that killed runs left beside `path`; those another process still holds are kept."""
    for stale in path.parent.glob(f".{path.name}.unfinished-*"):
        if stale == keep:
            continue
        with contextlib.ExitStack() as stack:
            try:
                for name in stale.glob(".lock-*"):
                    fcntl.flock(stack.enter_context(name.open("w")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            print(f"removing {stale}, left by an export of something else that was killed")
            shutil.rmtree(stale)


def refuse_existing(path: Path) -> None:
    """FileExistsError when there is something at `path`."""
    if os.path.lexists(path):
        raise FileExistsError(f"{path}: exists already. Nothing is overwritten: choose another directory, or remove this one first.")


def share(path: Path) -> None:
    """Give a file the permissions that the process's umask asks for; safetensors makes files readable by their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def write_atomically(path: Path, *, text: str) -> None:
    """Replace a small text file in one step."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
