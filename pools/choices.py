"""The states and kinds of hardware, with named groups where code asks about a set."""

from django.db import models


class HostState(models.TextChoices):
    UP = "up", "up"
    LOST = "lost", "lost"


class HostDuty(models.TextChoices):
    """What people want of a host, apart from whether it is there: `state` says that.

    active ⇄ draining; active or draining → retiring → retired. Only joining again leads back from there.
    """

    ACTIVE = "active", "serves"
    DRAINING = "draining", "finishes what it has and takes nothing new"
    RETIRING = "retiring", "leaves once its engines are stopped"
    RETIRED = "retired", "has left"


# Hosts whose engines are brought to an end.
LEAVING = (HostDuty.DRAINING, HostDuty.RETIRING, HostDuty.RETIRED)


class JobKind(models.TextChoices):
    """Work that takes minutes or hours and belongs to one host."""

    BUILD = "build", "native build"
    DOWNLOAD = "download", "download"


class JobState(models.TextChoices):
    """queued → running → done, failed or cancelled; back to queued when its head stops meanwhile."""

    QUEUED = "queued", "waits"
    RUNNING = "running", "runs"
    DONE = "done", "done"
    FAILED = "failed", "failed"
    CANCELLED = "cancelled", "cancelled"


OPEN_JOBS = (JobState.QUEUED, JobState.RUNNING)


class GpuKind(models.TextChoices):
    CPU = "cpu", "CPU"
    CUDA = "cuda", "CUDA"


class Speculation(models.TextChoices):
    """Who drafts tokens that a step then verifies; how many, and whether at all, is chosen by what pays."""

    NONE = "none", "nobody"
    MTP = "mtp", "the model's own draft head"
    LOOKUP = "lookup", "what followed earlier in the text"
    AUTO = "auto", "the head if there is one, else lookup"


class RunMode(models.TextChoices):
    """How a model's requests are laid out over its engines."""

    AUTO = "auto", "whatever costs least in all"
    FAST = "fast", "whatever answers this request soonest, others may wait"
    CONCURRENCY = "concurrency", "one engine a request, so that others have theirs"


class KvType(models.TextChoices):
    """In which form a model's engines keep keys and values; the names are llama.cpp's."""

    F16 = "f16", "f16"
    Q8_0 = "q8_0", "q8_0: half of it, hardly any loss"
    Q5_1 = "q5_1", "q5_1"
    Q4_0 = "q4_0", "q4_0: a quarter of it, some loss"


class Pooling(models.TextChoices):
    """What an engine makes of a model's last layer. The names are llama.cpp's."""

    NONE = "", "nothing: it generates text"
    MEAN = "mean", "embeddings, the mean of all tokens"
    CLS = "cls", "embeddings, the first token"
    LAST = "last", "embeddings, the last token"
    RANK = "rank", "relevance scores of query and document"
