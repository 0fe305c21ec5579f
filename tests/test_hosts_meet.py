"""How the tasks of several hosts meet: greetings, secrets, strangers, and who waits for whom. Here all
are on this machine. tests/native/test_hosts_meet.c has the parts alone."""

import hmac
import os
import re
import signal
import socket
import struct
import subprocess
import time

import pytest
from conftest import HANGS_S
from test_hosts import (  # noqa: F401 (given is a fixture)
    SECRET,
    await_steps,
    end,
    end_soon,
    environment,
    free_port,
    given,
    start_as,
    words,
)

# What tasks say first (native/hosts/meet.c): magic, version; rank, n, kind, port, has_secret; task,
# nonce. The answer: magic, rank, has_secret, nonce; then a proof. And what rank 0 says then.
HELLO, CHALLENGE = struct.Struct("16s32s5I16s32s"), struct.Struct("16s2I32s")
ANSWER, PROOF = struct.Struct("i256s"), 32


def greeting(version=b"0.1.0", rank=1, n=2, kind=0, task=b""):
    said = (rank, n, kind, 1, 1)
    return HELLO.pack(b"penstock tasks 2", version, *said, task, os.urandom(32))


def proof(side, hello, challenge, secret=SECRET):
    return hmac.digest(secret.encode(), b"penstock " + side + hello + challenge, "sha256")


def heard(s, n):
    return s.recv(n, socket.MSG_WAITALL)


def come(s, hello):
    """As one that connects. Returns its proof."""
    s.sendall(hello)
    challenge, theirs = heard(s, CHALLENGE.size), heard(s, PROOF)
    assert theirs == proof(b"accepts", hello, challenge)
    s.sendall(own := proof(b"connect", hello, challenge))
    return own


def accept(s, rank=0, secret=SECRET):
    """As one that listens. Returns the greeting, the challenge and the other one's proof."""
    hello = heard(s, HELLO.size)
    challenge = CHALLENGE.pack(b"penstock tasks 2", rank, 1, os.urandom(32))
    s.sendall(challenge + proof(b"accepts", hello, challenge, secret))
    return hello, challenge, heard(s, PROOF)


def connected(port, host="127.0.0.1"):
    """To rank 0, once it listens."""
    until = time.monotonic() + HANGS_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=HANGS_S)
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.02)


def answered(s):
    """The status and the message that a task gets, to the end of the connection; None: none."""
    seen = b""
    while piece := s.recv(1 << 16):
        seen += piece
    if not seen:
        return None
    status, message = ANSWER.unpack(seen[: ANSWER.size])
    return status, message.split(b"\0")[0].decode()


def test_a_longer_greeting_is_answered(given):
    """That of a version to come. The answer is not lost with the bytes that nobody reads."""
    port = free_port()
    task = start_as(given, "run", rank=0, port=port)
    with connected(port) as s:
        come(s, greeting(b"7.0"))
        s.sendall(bytes(100000))
        status, message = answered(s)
    codes, said = end_soon([task])
    assert codes == [2] and status < 0 and said == [f"penstock: {message}\n"]
    assert message.startswith("rank 1 is penstock 7.0, and rank 0 is 0.1.0")


@pytest.mark.parametrize(
    "answer, words",
    [
        (ANSWER.pack(-1, b"rank 1 is too old") + b"more", "rank 1 is too old"),
        (ANSWER.pack(-1, b"rank 1 is too old")[:100], "without an answer to rank 1: what rank 0 "),
    ],
    ids=["answers", "is gone"],
)
@pytest.mark.parametrize("accepted", [1, 2])
def test_rank_0_answers_early_or_is_gone(accepted, answer, words, given):
    """Before it takes the second connection, too; what follows the message does not matter."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as listener:
        task = start_as(given, "run", rank=1, port=port)
        taken = [listener.accept()[0]]
        assert all(HELLO.unpack(accept(s)[0])[2] == 1 for s in taken[:1])
        taken += [listener.accept()[0] for _ in range(accepted - 1)]
    taken[0].sendall(answer)
    for s in taken:
        s.close()
    codes, said = end_soon([task])
    assert codes == [2] and words in said[0] and said[0].count("\n") == 1, said


def test_all_tasks_are_told_why_one_is_refused(given):
    """Rank 2 has come before rank 1 is refused, and rank 3 comes after."""
    port = free_port()
    task = start_as(given, "run", rank=0, n=4, port=port)
    with connected(port) as two, connected(port) as one:
        come(two, greeting(rank=2, n=4))
        come(one, greeting(n=5))
        answers = [answered(one)]
        with connected(port) as three:
            come(three, greeting(rank=3, n=4))
            answers += [answered(three), answered(two)]
    codes, said = end_soon([task])
    assert codes == [2] and len(set(answers)) == 1 and said == [f"penstock: {answers[0][1]}\n"]
    assert "rank 1 was told of 5 tasks, and rank 0 of 4" in said[0]


def test_rank_0_ends_though_a_refused_task_talks_on(given):
    port = free_port()
    task = start_as(given, "run", rank=0, port=port)
    with connected(port) as s:
        come(s, greeting(n=3))
        since = time.monotonic()
        while time.monotonic() - since < 30:
            try:
                s.sendall(bytes(1 << 16))
            except ConnectionError:
                break
    codes, said = end_soon([task])
    assert codes == [2] and time.monotonic() - since < 30, said


def test_strangers_do_no_harm(given):
    """Some say nothing, some a part of a greeting, some something else. They are more than rank 0
    listens to at once."""
    port, said = free_port(), [b""] * 256 + [b"GET / HTTP/1.1\r\n\r\n", greeting()[:20]]
    first = start_as(given, "run", rank=0, port=port)
    strangers = [connected(port) for _ in said]
    for s, text in zip(strangers, said, strict=True):
        s.sendall(text)
    second = start_as(given, "run", rank=1, port=port)
    codes, words_said = end_soon([first, second])
    for s in strangers:
        s.close()
    assert codes == [0, 0] and words_said == ["", ""]


def is_hung_up_on(s):
    try:
        return not s.recv(1)
    except ConnectionResetError:
        return True


WRONG = [{"rank": 0}, {"rank": 3}, {"rank": 2**32 - 1}, {"kind": 2}]


def test_wrong_greetings_do_no_harm(given):
    """Rank 0 hangs up on each, says each reason once, and goes on with those that come then."""
    port, own = free_port(), b"the same task"
    first = start_as(given, "run", rank=0, n=3, port=port)
    for wrong in WRONG * 2:
        with connected(port) as s:
            old = come(s, hello := greeting(**{"n": 3} | wrong))
            assert answered(s)[0] == -1
        with connected(port) as s:  # the old proof proves nothing again
            s.sendall(hello)
            heard(s, CHALLENGE.size + PROOF)
            s.sendall(old)
            assert answered(s) is None
    with connected(port) as s:  # who does not know the secret ends nobody
        s.sendall(greeting(n=5))
        heard(s, CHALLENGE.size + PROOF)
        s.sendall(bytes(PROOF))
        assert answered(s) is None
    one = connected(port)
    come(one, greeting(rank=1, n=3, task=own))
    second, other = [start_as(given, "run", rank=r, n=3, port=port) for r in (2, 1)]
    codes, said = end_soon([other])
    assert codes == [2] and "two tasks have rank 1: each needs a rank of its own" in said[0], said
    with connected(port) as s:  # rank 1's data, from another task
        come(s, greeting(rank=1, n=3, kind=1, task=b"another task"))
        assert answered(s)[0] == -1
    with connected(port) as data:
        come(data, greeting(rank=1, n=3, kind=1, task=own))
        assert struct.unpack("i", heard(one, 4)) == (0,)
        one.close()
    codes, said = end_soon([first, second])
    assert codes == [1, 2] and "is gone" in said[0] and "cannot connect to rank 1" in said[1], said
    lines = said[0].splitlines()[:-1]
    assert len(lines) == 2 and sum("its secret is another one" in line for line in lines) == 1
    assert all(line.startswith("penstock: rank 0 hung up on 127.0.0.1, which ") for line in lines)


def test_who_comes_late_is_told(given):
    """And the secret is in no file of the run."""
    port, run = free_port(), given[2] / "run"
    more = ("--steps", 100000, "--quiet=false")
    tasks = [start_as(given, "run", *more, rank=r, port=port) for r in (0, 1)]
    await_steps(run)
    codes, said = end_soon([start_as(given, "late", rank=1, port=port)])
    assert codes == [2] and "all 2 tasks have met already, so that two have rank 1" in said[0], said
    tasks[0].send_signal(signal.SIGINT)
    codes, said = end(tasks, 30)
    assert codes == [130, 130] and said[0].count("hung up on") == 1, said
    for path in [p for p in run.rglob("*") if p.is_file()]:
        assert SECRET.encode() not in path.read_bytes(), path


NO_SECRET = (
    "there is no secret, and others than the tasks may reach rank 0 at 192.0.2.1: set PENSTOCK_H"
)
NOT_OWN = "MASTER_ADDR 192.0.2.1 is no address of rank 0's host: give one that is"


@pytest.mark.parametrize(
    "rank, more, env, why",
    [
        (0, (), {}, NO_SECRET),
        (1, (), {}, NO_SECRET),
        (0, ("--hosts-insecure",), {}, NOT_OWN),
        (0, (), {"PENSTOCK_HOSTS_SECRET": SECRET}, NOT_OWN),
        (0, (), {"PENSTOCK_HOSTS_SECRET": "too short"}, "PENSTOCK_HOSTS_SECRET has 9 characters: "),
        (0, (), {"PENSTOCK_HOSTS_SECRET_FILE": "/nowhere"}, "/nowhere: cannot be opened: "),
        (0, (), {"PENSTOCK_HOSTS_LISTEN": "0.0.0.0"}, "rank 0 at 0.0.0.0: set PENSTOCK_HOSTS_SECR"),
        (0, (), {"PENSTOCK_HOSTS_LISTEN": "127.0.0.1"}, "rank 1 did not come to 192.0.2.1 port "),
    ],
)  # fmt: skip
def test_off_the_loopback(rank, more, env, why, given):
    """192.0.2.1 is an address for documents (RFC 5737), which no host has."""
    model, shard, folder = given
    done = subprocess.run(
        words(model, shard, folder / "run", *more, "--hosts-wait", 0.5),
        env=environment(rank=rank, port=free_port(), MASTER_ADDR="192.0.2.1") | env,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 2 and why in done.stderr and done.stderr.count("\n") == 1, done
    assert "too short" not in done.stderr and not (folder / "run").exists()


def test_other_secrets(given):
    """Both sides say it, and rank 0 goes on waiting for the right one, whose secret is in a file."""
    port, none = free_port(), {"PENSTOCK_HOSTS_SECRET": None}
    file = given[2] / "secret"
    file.write_text(SECRET + "\n")
    other = {"PENSTOCK_HOSTS_SECRET": SECRET[::-1]}
    first = start_as(given, "run", rank=0, port=port)
    set_it = ": set PENSTOCK_HOSTS_SECRET to the same in all tasks\n"
    for env, why in (
        (other, "its secret is another one"),
        (none, "it has a secret, and this task has none"),
    ):
        codes, said = end_soon([start_as(given, "run", rank=1, port=port, **env)])
        where = f"rank 1 hung up on rank 0 at 127.0.0.1 port {port}"
        assert codes == [2] and said == [f"penstock: {where}: {why}{set_it}"]
    env = none | {"PENSTOCK_HOSTS_SECRET_FILE": str(file)}
    codes, said = end_soon([first, start_as(given, "run", rank=1, port=port, **env)])
    why = "which says that it is rank 1: its secret is another one"
    assert codes == [0, 0] and said == [f"penstock: rank 0 hung up on 127.0.0.1, {why}{set_it}", ""]
    port = free_port()
    tasks = [
        start_as(given, "run", *more, rank=rank, port=port, **env)
        for rank, more, env in ((0, ("--hosts-wait", 5), none), (1, (), {}))
    ]
    codes, said = end_soon(tasks)
    assert codes == [2, 2] and "it has no secret, and this task has one" in said[1], said
    assert said[0].count("it has a secret, and this task has none") == 2, (
        said
    )  # when, and at the end


def test_a_false_rank_0_learns_nothing(given):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as listener:
        task = start_as(given, "run", rank=1, port=port)
        with listener.accept()[0] as s:
            hello, _, theirs = accept(s, secret="another secret than the tasks'")
            assert theirs == bytes(PROOF)
    codes, said = end_soon([task])
    assert codes == [2] and "its secret is another one" in said[0] and SECRET not in said[0]


def test_tasks_listen_at_one_address(given):
    """Rank 0 at MASTER_ADDR, and rank 1 where it reaches rank 0 from."""
    port, more = free_port(), ("--hosts-wait", 30)
    with socket.create_server(("127.0.0.1", port)) as listener:
        second = start_as(given, "run", *more, rank=1, n=3, port=port)
        with listener.accept()[0] as s:
            own = HELLO.unpack(accept(s)[0])[5]
            first = start_as(given, "run", *more, rank=0, n=3, port=(at := free_port()))
            for there in (own, at):
                connected(there).close()
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.2", there))
            second.kill()
            first.kill()
    end([first, second])


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_comes(rank, tiny_model, tiny_shard, tmp_path):
    more = ("--hosts-wait", 1)
    done = subprocess.run(
        words(tiny_model, tiny_shard, tmp_path / "run", *more),
        env=environment(rank=rank, port=free_port()),
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    said = "nobody answers at 127.0.0.1" if rank else "rank 1 did not come to 127.0.0.1 port "
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_long_wait_is_said(given):
    """--quiet drops the line, and rank 2, whom rank 0 has heard, leaves it to rank 0."""
    port, quiet, loud = free_port(), ("--hosts-wait", 5), ("--hosts-wait", 5, "--quiet=false")
    tasks = [
        start_as(given, "run", *loud, rank=0, n=4, port=port),
        start_as(given, "run", *loud, rank=1, n=4, port=free_port()),
        start_as(given, "run", *quiet, rank=1, n=4, port=free_port()),
    ]
    connected(port).close()
    late = ("--hosts-wait", 30, "--quiet=false")
    codes, said = end([*tasks, start_as(given, "run", *late, rank=2, n=4, port=port)])
    assert codes == [2] * 4, said
    here = rf"127\.0\.0\.1 port {port}"
    left = r"penstock: rank 0 hung up on 127\.0\.0\.1: it says nothing that a task says\n"
    ends = rf"penstock: rank 1 did not come to {here} within 5 s: 4 tasks were to be started\n"
    waits = rf"penstock: rank 0 waits at {here} for rank 1 and [12] more: 5 s at most\n"
    assert re.fullmatch(left + waits + ends, said[0]), said
    wait = r"penstock: rank 1 waits for rank 0 at 127\.0\.0\.1 port \d+: 5 s at most\n"
    nobody = r"penstock: nobody answers at 127\.0\.0\.1 port \d+ within 5 s: .*\n"
    assert re.fullmatch(wait + nobody, said[1]) and re.fullmatch(nobody, said[2]), said
    assert re.fullmatch(ends, said[3]), said
