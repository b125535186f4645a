"""A real Slurm of this machine's own: munged, slurmctld, and two slurmd, n1 and n2.

    with Cluster() as slurm:
        job = slurm.submit(script, cwd=folder)       # its number
        slurm.wait_for(job, "up", folder / "out")    # a line of its output
        slurm.scancel(job)
        done = slurm.wait(job)                       # Done(state, status, signal)

Everything lies in one temporary folder, with sockets, keys and ports of its own; whatever was
started from there is found by the SLURM_CONF in its environment, and killed at the end. Needs
slurm-wlm and munge of Debian, and libpmix-dev for ``srun --mpi=pmix``; no root.
"""

import contextlib
import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ["Cluster", "Done", "missing"]

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
FOLDERS = ("state", "log", "tmp/n1", "tmp/n2", "spool/n1", "spool/n2")
# Two slurmd of one machine have PMIx folders of their own only if TmpFS names the node.
CONFIGURATION = """
ClusterName=mpiml
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={folder}/tmp/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
ReturnToService=2
KillWait=2
MinJobAge=600
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 Gres=gpu:4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 Gres=gpu:4
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=60 State=UP
"""
# Devices, as far as Slurm looks at them.
GPUS = "AutoDetect=off\nName=gpu File=/dev/null,/dev/zero,/dev/full,/dev/random\n"


def missing():
    """Return the programs that a Slurm needs and this machine lacks."""
    return [name for name in NEEDED if shutil.which(name, path=_path()) is None]


def _path():
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


class Done(NamedTuple):
    """How a job ended: Slurm's word for it, its exit status, and the signal that killed it."""

    state: str
    status: int
    signal: int


class Cluster:
    """A Slurm that lives as long as the context."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="mpiml-slurm-"))
        self.folder.chmod(0o755)
        for name in FOLDERS:
            (self.folder / name).mkdir(parents=True)
        with contextlib.ExitStack() as held:  # together, so that they differ
            sockets = [held.enter_context(socket.socket()) for _ in range(3)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            ports = [each.getsockname()[1] for each in sockets]
        self.conf = self.folder / "slurm.conf"
        self.conf.write_text(
            CONFIGURATION.format(
                host=socket.gethostname().partition(".")[0],
                user=getpass.getuser(),
                folder=self.folder,
                ports=ports,
            )
        )
        (self.folder / "gres.conf").write_text(GPUS)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        self.environ = os.environ | {"SLURM_CONF": str(self.conf), "PATH": _path()}
        self.shared_memory = Path("/dev/shm")
        self._daemons = []

    def __enter__(self):
        folder = self.folder
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed")]
        munge = [f"--socket={folder}/munge.socket", f"--log-file={folder}/log/munge"]
        try:
            self._start("munged", "--foreground", "--force", *files, *munge)
            self.poll((folder / "munge.socket").exists, 20, "munge's socket")
            self._start("slurmctld", "-D", "-c")
            apart = self._memory_apart()
            for node in ("n1", "n2"):
                self._start(*apart, "env", f"PMIX_HOSTNAME={node}", "slurmd", "-D", "-N", node)
            self.poll(self._idle, 30, "both nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, *command):
        # So it ends too when this process is ended by a time limit.
        tie = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with open(self.folder / "log/out", "a") as log:
            daemon = subprocess.Popen(
                [*tie, *command],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._daemons.append(daemon)

    def _memory_apart(self):
        """Return what gives jobs a /dev/shm of their own, where this user may: else nothing."""
        own = self.folder / "shm"
        own.mkdir()
        words = ["unshare", "--mount", "sh", "-c", f'mount --bind {own} /dev/shm && exec "$@"']
        tried = subprocess.run([*words, "sh", "true"], capture_output=True, check=False)
        if tried.returncode:
            return []
        self.shared_memory = own
        return [*words, "sh"]

    def _idle(self):
        for daemon in self._daemons:
            assert daemon.poll() is None, f"{daemon.args} has ended\n{self.logs()}"
        return self.ask("sinfo", "-hNo", "%t", check=False).split() == ["idle", "idle"]

    def poll(self, done, timeout, what):
        """Wait until `done` returns true; fail with all logs at the limit."""
        limit = time.monotonic() + timeout
        while not done():
            if time.monotonic() > limit:
                raise AssertionError(f"no {what} within {timeout} s\n{self.logs()}")
            time.sleep(0.05)

    def logs(self):
        """Return the ends of all logs."""
        parts = []
        for path in sorted((self.folder / "log").iterdir()):
            parts += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-30:]]
        return "\n".join(parts)

    def ask(self, *command, env=None, cwd=None, check=True):
        """Run one of Slurm's commands and return what it prints."""
        done = subprocess.run(
            command,
            env=self.environ | (env or {}),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def submit(self, script, *options, cwd, env=None):
        """Submit a script; return the number of the job. Its output goes to ``cwd/out``."""
        words = ["sbatch", "--parsable", "--output=out", *options, str(script)]
        return int(self.ask(*words, env=env, cwd=cwd).split(";")[0])

    def show(self, job):
        """Return what Slurm says of a job, as a dict of words."""
        said = self.ask("scontrol", "show", "job", "-o", str(job)).splitlines()[0]
        return dict(re.findall(r"(\w+)=(\S*)", said))

    def wait_for(self, job, text, path, timeout=60):
        """Wait until a line of the job's output has this text."""

        def there():
            said = path.read_text() if path.exists() else ""
            ended = text not in said and self.ended(job)
            assert not ended, f"job {job} ended without {text!r}: {self.show(job)}\n{said}"
            return text in said

        self.poll(there, timeout, f"{text!r} of job {job}")

    def ended(self, job):
        """Return whether a job has ended."""
        return self.show(job)["JobState"] not in (
            "PENDING",
            "RUNNING",
            "COMPLETING",
            "CONFIGURING",
        )

    def wait_process(self, job, word, timeout=60):
        """Wait until a job has a process with this word in its command line."""
        self.poll(
            lambda: any(word in line.split() for line in self.processes(job).values()),
            timeout,
            f"{word} of job {job}",
        )

    def wait(self, job, timeout=60):
        """Wait until a job has ended; return how."""
        self.poll(lambda: self.ended(job), timeout, f"end of job {job}")
        said = self.show(job)
        status, _, number = said["ExitCode"].partition(":")
        return Done(said["JobState"], int(status), int(number))

    def warn(self, job):
        """Send what ``--signal=B:USR1@T`` sends when the time is nearly up."""
        self.ask("scancel", "--signal=USR1", "--batch", str(job))

    def scancel(self, job):
        """Cancel a job."""
        self.ask("scancel", str(job))

    def clear(self):
        """Cancel whatever is left; wait until both nodes are idle."""
        if jobs := self.ask("squeue", "--noheader", "--format=%A").split():
            self.ask("scancel", *jobs, check=False)  # one may end by itself meanwhile
        self.poll(self._idle, 30, "idle nodes")

    def steps(self, job):
        """Return whether the job's script has started something that still runs."""
        said = self.ask("squeue", "--steps", "--noheader", "--format=%i", f"--jobs={job}")
        return [word for word in said.split() if not word.endswith((".batch", ".extern"))]

    def processes(self, job=None):
        """Find what has been started from here, or for one job: command lines by number."""
        marks = {f"SLURM_CONF={self.conf}".encode()}
        if job is not None:
            marks.add(f"SLURM_JOB_ID={job}".encode())
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # gone meanwhile
                if marks <= set((folder / "environ").read_bytes().split(b"\0")):
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(folder.name)] = line
        return {pid: line for pid, line in found.items() if pid != os.getpid()}

    def wait_gone(self, job, timeout=30):
        """Wait until no process of a job lives."""
        self.poll(lambda: not self.processes(job), timeout, f"end of {self.processes(job)}")
