"""What can go wrong with a build."""


class BuildFailed(RuntimeError):
    """A build that cannot begin or did not end well; `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
