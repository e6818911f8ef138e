"""Everything that ends or prevents a run, each told in one line.

SupervisorError
├── HomeInUse            another supervisor or command holds this HYDRA_HOME
├── HomeUnusable         HYDRA_HOME cannot be made or written
├── PortUnavailable      HYDRA_PORT cannot be listened on
├── DiskFull             too little room where HYDRA_HOME lies
├── KeysRequired         a bind beyond loopback without an API key
├── ServerMissing        a server binary or a system tool is not there
├── ServerFailed         PostgreSQL or Valkey does not come up
├── ChildFailed          a child of the stack does not come up
├── JoinRefused          a site did not let this machine into its pool
├── ModelUnavailable     the default model cannot be had
└── StartTimeout         the stack did not come up in time
"""


class SupervisorError(Exception):
    """The run cannot start or go on. The message is one line; `log_tail` is the end of the log that tells more."""

    code = "supervisor"
    http_status = 503
    retryable = False
    hint = ""

    def __init__(self, message: str, *, hint: str = "", log_tail: str = "") -> None:
        self.hint = hint or type(self).hint
        self.log_tail = log_tail
        super().__init__(message)

    def line(self) -> str:
        """The message and what to do about it, in one line."""
        message = " ".join(str(self).split())
        return f"{message}: {self.hint}" if self.hint else message


class HomeInUse(SupervisorError):
    code = "home_in_use"
    retryable = True
    hint = "stop it first, or choose another HYDRA_HOME"


class HomeUnusable(SupervisorError):
    code = "home_unusable"
    hint = "choose a directory you may write with HYDRA_HOME"


class PortUnavailable(SupervisorError):
    code = "port_unavailable"
    hint = "stop what uses it, or choose another port with HYDRA_PORT"


class DiskFull(SupervisorError):
    code = "disk_full"
    hint = "free some space, or choose another disk with HYDRA_HOME"


class KeysRequired(SupervisorError):
    code = "keys_required"
    hint = "make one with `manage.py apikey create NAME`, or listen on 127.0.0.1"


class ServerMissing(SupervisorError):
    code = "server_missing"
    hint = "run `make run` once more, it installs what is missing"


class ServerFailed(SupervisorError):
    code = "server_failed"
    retryable = True


class ChildFailed(SupervisorError):
    code = "child_failed"
    retryable = True


class JoinRefused(SupervisorError):
    code = "join_refused"


class ModelUnavailable(SupervisorError):
    code = "model_unavailable"
    retryable = True


class StartTimeout(SupervisorError):
    code = "start_timeout"
    retryable = True
