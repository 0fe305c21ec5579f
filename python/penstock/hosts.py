"""Several hosts that train one model: a task on each, which torchrun, srun or mpirun starts."""

from ._handle import Handle, Owner
from ._lib import check, ffi, lib, struct, text
from .checkpoint import _CUT
from .errors import BudgetError

_TRANSPORTS = ("auto", "nccl", "tcp")


class Hosts(Owner):
    """The tasks that train one model together, one a host (docs/gpus.md, "Several machines").

    with Hosts.from_launcher() as hosts:
        plan = Plan(model, seq_len=4096, tokens_per_step=1 << 20, hosts=hosts)
        with Trainer("my_model", plan, "my_shards") as trainer:
            for metrics in trainer.steps(1000):
                ...
            if hosts.rank == 0:
                trainer.save("trained")

    Every task runs the same script: it makes the same Plan and Trainer, and runs the same number of
    steps. Let rank 0 alone write files, checkpoints among them. Leaving the block by an exception
    ends the other tasks too, with its text.

    rank   this task's number, from 0
    n      how many tasks there are; with 1 everything is as without Hosts
    """

    def __init__(
        self,
        rank: int,
        n: int,
        address: str = "127.0.0.1",
        port: int = 29500,
        *,
        wait: float = 300.0,
        transport: str = "auto",
        insecure: bool = False,
    ):
        """Meets the other tasks: rank 0 listens at port, the others connect to address. Takes up to
        `wait` seconds. transport says what moves gradients: "nccl", "tcp", or "auto", NCCL where
        all tasks have GPUs and the library. Other addresses than the loopback need the
        environment's PENSTOCK_HOSTS_SECRET, or insecure=True (docs/gpus.md, "Several machines").
        Raises InvalidError, InputOutputError."""
        if transport not in _TRANSPORTS:
            raise ValueError(f"transport is {transport!r}: give auto, nccl or tcp")
        self.rank, self.n = rank, n
        self._wanted, self._chosen = _TRANSPORTS.index(transport), None
        if n == 1:
            return
        name = ffi.new("char[]", address.encode())
        config = struct(
            "ps_hosts_config",
            rank=rank,
            n_hosts=n,
            port=port,
            address=name,
            wait_s=wait,
            insecure=insecure,
        )
        out = ffi.new("ps_hosts **")
        check(lib.ps_hosts_open(out, config))
        self._handle = Handle("hosts", out[0], lib.ps_hosts_close)

    @classmethod
    def from_launcher(
        cls, *, wait: float = 300.0, transport: str = "auto", insecure: bool = False
    ) -> "Hosts":
        """The tasks that torchrun, srun or mpirun started; without a launcher this one alone.
        Raises InvalidError, with the words to type, where the launcher started several tasks on
        this host; and what the constructor raises."""
        task = struct("ps_hosts_task")
        check(lib.ps_hosts_task_find(task))
        address = text(task.address)
        more = {"wait": wait, "transport": transport, "insecure": insecure}
        return cls(task.rank, task.n_hosts, address, task.port, **more)

    @property
    def transport(self) -> str:
        """What moves gradients, and why. The first Plan decides it."""
        if self._handle is None:
            return "gradients stay on this host"
        return text(lib.ps_hosts_transport_text(self._handle.ptr))

    def fail(self, why: str) -> None:
        """End the other tasks: what they wait for raises InputOutputError with this text."""
        if self._handle is not None:
            lib.ps_hosts_fail(self._handle.ptr, lib.PS_EIO, str(why).encode())

    def close(self) -> None:
        """Leave the other tasks, which may go on. A trainer that is open keeps the connections
        until its end."""
        if self._handle is not None:
            self._handle.drop()

    def __enter__(self):
        return self

    def __exit__(self, kind, exception, _traceback):
        if exception is not None:
            self.fail(f"{kind.__name__}: {exception}")
        self.close()

    # ---- what Plan and Trainer call --------------------------------------------------------------

    def _join(self, config, hardware) -> None:
        """Before a search: what moves gradients, the network's rate into hardware, and on all but
        rank 0 the cut that rank 0 found."""
        if self.n == 1:
            return
        if self._chosen is None:
            out, on_gpu = ffi.new("uint32_t *"), hardware.backend == lib.PS_BACKEND_CUDA
            check(lib.ps_hosts_choose(self._handle.ptr, self._wanted, int(on_gpu), out))
            self._chosen = out[0]
        config.hosts = self._handle.ptr
        self._measure(config, hardware)
        if self.rank:
            for name, tokens in zip(_CUT, self._share((0,) * len(_CUT)), strict=True):
                setattr(config, name, tokens)

    def _measure(self, config, hardware) -> None:
        link = hardware.link[lib.PS_LINK_NETWORK]
        rate = ffi.new("double *", link.bytes_per_s)
        check(lib.ps_hosts_measure(self._handle.ptr, hardware.device, config.host_mem_bytes, rate))
        link.bytes_per_s = rate[0]

    def _refused(self, config, why: BudgetError) -> BudgetError:
        """No plan fits under the caps of this task. On all but rank 0 its cut is rank 0's."""
        if self.rank == 0:
            return why
        cut = ", ".join(f"{name}={getattr(config, name)}" for name in _CUT)
        return BudgetError(
            f"{why}; the cut of a step is that of rank 0's plan ({cut}): give a smaller one there"
        )

    def _found(self, report: dict) -> None:
        """After the search of rank 0: give its cut to the others, whose searches follow."""
        if self.n > 1 and self.rank == 0:
            self._share(tuple(report[name] for name in _CUT))

    def _share(self, numbers: tuple) -> tuple:
        values = ffi.new("uint64_t[]", numbers)
        check(lib.ps_hosts_share(self._handle.ptr, values, ffi.sizeof(values)))
        return tuple(values)
