"""Replaces the model of a directory as a whole, for init_model.py. native/io/stage.c explains the
steps and uses the same names. It stands alone, as init_model.py does."""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import sys


class Halfway(Exception):
    """The new model counts, but the replacement of the old one is not complete."""


OURS, SAVE, OLD, PENDING, REPLACING = (
    ".penstock-",
    ".penstock-save-",
    ".penstock-old-",
    ".penstock-new",
    ".replacing",
)
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)
TEMPLATES, RECORD = "additional_chat_templates", "penstock.json"
WEIGHTS = re.compile(
    r"(.+?)(?:-[0-9]{5}-of-[0-9]{5}\.safetensors|\.safetensors(?:\.index\.json)?)", re.DOTALL
)
DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
REFUSED = (
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.EBUSY,
    errno.EPERM,
    errno.EACCES,
    errno.EROFS,
)


def in_tokenizer(name):
    return name in TOKENIZER or name.split("/")[0] == TEMPLATES


def in_model(name):
    return (
        name in ("config.json", "generation_config.json", RECORD)
        or in_tokenizer(name)
        or bool(WEIGHTS.fullmatch(name))
    )


def there(path):
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def superseded(folder, name):
    """The whole model in the folder replaces file `name` of an older model. Weights of one stem are
    replaced together, and so are the files of a tokenizer."""
    m = WEIGHTS.fullmatch(name)
    names = [
        name,
        *(TOKENIZER if in_tokenizer(name) else ()),
        *((f"{m[1]}.safetensors", f"{m[1]}.safetensors.index.json") if m else ()),
    ]
    return in_model(name) and any(there(os.path.join(folder, n)) for n in names)


def file_entry(folder, name):
    """What a record says of a file."""
    with open(os.path.join(folder, name), "rb") as f:
        data = f.read()
    return {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def recorded(folder, name):
    """A save has written file `name`, and nobody has changed it since."""
    for record in (RECORD, "manifest.json"):
        try:
            with open(os.path.join(folder, record), "rb") as f:
                if file_entry(folder, name) in json.load(f)["files"]:
                    return True
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass  # no record, or none that can be used
    return False


def replaced(out, folder, name):
    """superseded() for file `name` of `out`. Of a tokenizer's files those that the new model lacks
    stay, unless an earlier save has written them."""
    if not superseded(folder, name):
        return False
    return not in_tokenizer(name) or bool(there(os.path.join(folder, name)) or recorded(out, name))


def names_in(folder):
    """The names in a directory; of the folder of chat templates those of its files."""
    names = os.listdir(folder)
    inner = os.path.join(folder, TEMPLATES)
    if TEMPLATES in names and os.path.isdir(inner) and not os.path.islink(inner):
        names.remove(TEMPLATES)
        names += [f"{TEMPLATES}/{n}" for n in os.listdir(inner)]
    return names


def drop_empty_templates(folder):
    try:
        os.rmdir(os.path.join(folder, TEMPLATES))
    except OSError:
        pass  # there is none, or some stay


def is_at(fd, path):
    found = there(path)
    return found is not None and os.path.samestat(os.fstat(fd), found)


def lock(fd, how):
    """True: locked now. False: another process has the lock. None: this file system has no
    locks."""
    try:
        fcntl.flock(fd, how)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


def sync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno != errno.EINVAL:  # EINVAL: this file system cannot sync directories
            raise
    finally:
        os.close(fd)


def copy_facts(source, target):
    st, now = os.stat(source), os.stat(target)
    if (st.st_uid, st.st_gid) != (now.st_uid, now.st_gid):
        os.chown(target, st.st_uid, st.st_gid)
    for name in os.listxattr(source):
        try:
            os.setxattr(target, name, os.getxattr(source, name))
        except OSError:
            if not name.startswith(("security.", "trusted.")):  # the system sets these itself
                raise
    os.chmod(target, stat.S_IMODE(st.st_mode))
    os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns))


def carry(source, target):
    """Link a file to `target`; copy a folder, with links to its files."""
    st = there(source)
    if st is None:
        return
    if os.path.basename(os.path.dirname(target)) == TEMPLATES:
        os.makedirs(os.path.dirname(target), exist_ok=True)
    if st.st_dev != os.stat(os.path.dirname(source)).st_dev:
        raise OSError(errno.EXDEV, "a mount point cannot be carried", source)
    if not stat.S_ISDIR(st.st_mode):
        os.link(source, target, follow_symlinks=False)
        return
    os.mkdir(target, 0o700)
    for name in os.listdir(source):
        carry(os.path.join(source, name), os.path.join(target, name))
    copy_facts(source, target)
    sync(target)


def remove_tree(path):
    if stat.S_ISDIR(os.lstat(path).st_mode):
        os.chmod(path, 0o700)
        for name in os.listdir(path):
            remove_tree(os.path.join(path, name))
        os.rmdir(path)
    else:
        os.unlink(path)


def retire(source, target, top, fresh):
    """Empty a directory whose place `target` has taken. Files that `target` does not know move
    there. top: both are model directories, not folders in them. fresh: the place was taken just
    now."""
    os.chmod(source, 0o700)
    for name in os.listdir(source):
        a, b = os.path.join(source, name), os.path.join(target, name)
        old, new = os.lstat(a), there(b)
        if top and (name == PENDING or (superseded(target, name) if fresh else in_model(name))):
            remove_tree(a)
        elif new is None:
            os.rename(a, b)
        elif stat.S_ISDIR(old.st_mode):
            retire(a, b, False, fresh)
        elif fresh and not os.path.samestat(old, new):
            os.rename(a, b)
        else:
            os.unlink(a)
    os.rmdir(source)


def move_pending(out):
    """Move the files of out/.penstock-new into `out`. May be called again after any failure."""
    pending = os.path.join(out, PENDING)
    try:
        if there(os.path.join(pending, REPLACING)):
            old = [n for n in names_in(out) if replaced(out, pending, n)]
            # the record says which files are the old model's: it goes last
            for name in sorted(old, key=lambda n: (n == RECORD, n != "config.json")):
                os.unlink(os.path.join(out, name))
            drop_empty_templates(out)
            sync(out)
            os.unlink(os.path.join(pending, REPLACING))
            sync(pending)
        for name in sorted(
            os.listdir(pending), key=lambda n: (n == "config.json", n.endswith(".index.json"))
        ):
            os.rename(os.path.join(pending, name), os.path.join(out, name))
        sync(out)
        os.rmdir(pending)
    except OSError as e:
        raise Halfway(
            f"{out}: the new model is complete in {pending} and counts, but "
            f"{e.filename or 'a file'} cannot be "
            f"moved: {e.strerror}; the next save into {out} tries again"
        ) from None


def settle(out):
    """Complete the move of an earlier save, or wait for one that another process makes."""
    pending = os.path.join(out, PENDING)
    while there(pending):
        fd = os.open(pending, DIR_FLAGS)
        try:
            lock(fd, fcntl.LOCK_EX)
            if is_at(fd, pending):
                move_pending(out)
        finally:
            os.close(fd)


def exchange(a, b):
    """Let two directories change places. False: they cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    at_cwd, rename_exchange = -100, 2
    if libc.renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), rename_exchange) == 0:
        return True
    if ctypes.get_errno() in REFUSED:
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), b)


class Stage:
    """The directory `path`, into which the new model is written."""

    def __init__(self, out):
        self.target = os.path.realpath(out)
        self.parent, self.base = os.path.split(self.target)
        self.fd = None
        over = os.path.isdir(self.target)
        if over:
            settle(self.target)
        self.clear(over)
        self.make(self.target if over else self.parent, "" if over else "." + self.base)
        cwd = os.path.join(os.getcwd(), "")
        self.beside = not over
        if over and self.base and not cwd.startswith(os.path.join(self.target, "")):
            try:
                self.rename(SAVE)
                self.beside = True
            except OSError:
                pass  # the stage stays inside the directory

    def make(self, folder, prefix):
        while True:
            self.path = os.path.join(folder, prefix + SAVE + secrets.token_hex(8))
            os.mkdir(self.path)
            try:
                self.fd = os.open(self.path, DIR_FLAGS)
            except FileNotFoundError:
                continue  # another save took it for a leftover
            except OSError:
                os.rmdir(self.path)
                raise
            if lock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB) is not False and is_at(
                self.fd, self.path
            ):
                break
            os.close(self.fd)
        self.mode = stat.S_IMODE(os.fstat(self.fd).st_mode)
        os.fchmod(self.fd, 0o700)

    def rename(self, kind):
        path = os.path.join(self.parent, "." + self.base + kind + secrets.token_hex(8))
        os.rename(self.path, path)
        self.path = path

    def clear(self, over):
        """Remove what saves that were cut off have left."""
        inside = (
            [os.path.join(self.target, n) for n in os.listdir(self.target) if n.startswith(SAVE)]
            if over
            else []
        )
        stem = "." + self.base
        for path in inside + [
            os.path.join(self.parent, n)
            for n in os.listdir(self.parent)
            if n.startswith((stem + SAVE, stem + OLD))
        ]:
            try:
                self.clear_one(path, over)
            except OSError as e:
                print(
                    f"init_model: {path}, left by a save that was cut off, cannot be removed: "
                    f"{e.strerror}",
                    file=sys.stderr,
                )

    def clear_one(self, path, over):
        fd = os.open(path, DIR_FLAGS)
        try:
            trusted = {os.geteuid(), *([os.stat(self.target).st_uid] if over else [])}
            if (
                os.fstat(fd).st_uid in trusted
                and lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                and is_at(fd, path)
            ):
                if OLD not in os.path.basename(path):
                    remove_tree(path)
                elif over:
                    retire(path, self.target, True, False)
        finally:
            os.close(fd)

    def abort(self):
        if self.fd is not None:
            if is_at(self.fd, self.path):  # not so after it has taken the target's place
                remove_tree(self.path)
            os.close(self.fd)
            self.fd = None

    def commit(self):
        names = sorted(n for n in names_in(self.path) if not WEIGHTS.fullmatch(n))
        if any(in_tokenizer(n) for n in names):
            with open(os.path.join(self.path, RECORD), "x") as f:
                files = [file_entry(self.path, n) for n in names]
                json.dump({"format": "penstock model", "files": files}, f, indent=1)
        for name in os.listdir(self.path):
            sync(os.path.join(self.path, name))
        sync(self.path)
        if not os.path.isdir(self.target):
            os.fchmod(self.fd, self.mode)
            os.rename(self.path, self.target)
            self.sync_parent()
        elif not (self.beside and self.change_places()):
            self.move_in()

    def sync_parent(self):
        try:
            sync(self.parent)
        except OSError as e:
            raise Halfway(
                f"{self.target}: has the new model, but it may not outlast a power cut: "
                f"{e.strerror}"
            ) from None

    def change_places(self):
        kept = [
            n
            for n in names_in(self.target)
            if not n.startswith(OURS) and not replaced(self.target, self.path, n)
        ]
        done = False
        try:
            for name in kept:
                carry(os.path.join(self.target, name), os.path.join(self.path, name))
            copy_facts(self.target, self.path)
            ready = True
        except OSError:
            ready = False  # a file cannot be linked
        if ready:
            sync(self.path)
            self.rename(OLD)
            done = exchange(self.path, self.target)
            if not done:
                self.rename(SAVE)
        if not done:
            for name in kept:
                if there(os.path.join(self.path, name)):
                    remove_tree(os.path.join(self.path, name))
            drop_empty_templates(self.path)
            return False
        self.sync_parent()  # until the exchange is on the disk, the old directory must stay whole
        try:
            retire(self.path, self.target, True, True)
        except OSError as e:
            print(
                f"init_model: {self.target}: has the new model, but the old directory could not be "
                "removed: it is "
                f"{self.path}: {e.strerror}; the next save tries again",
                file=sys.stderr,
            )
        return True

    def move_in(self):
        with open(os.path.join(self.path, REPLACING), "xb"):
            pass
        os.fchmod(self.fd, stat.S_IMODE(os.stat(self.target).st_mode) & 0o777)
        sync(self.path)
        pending = os.path.join(self.target, PENDING)
        while True:
            settle(self.target)
            try:
                os.rename(self.path, pending)
                break
            except OSError as e:
                if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        try:
            sync(self.target)
        except OSError as e:
            raise Halfway(
                f"{self.target}: has the new model, but it may not outlast a power cut: "
                f"{e.strerror}"
            ) from None
        move_pending(self.target)
