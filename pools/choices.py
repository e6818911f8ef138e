"""The states and kinds of hardware, with named groups where code asks about a set."""

from django.db import models


class HostState(models.TextChoices):
    UP = "up", "up"
    LOST = "lost", "lost"


class GpuKind(models.TextChoices):
    CPU = "cpu", "CPU"
    CUDA = "cuda", "CUDA"


class Speculation(models.TextChoices):
    """Who drafts tokens that a step then verifies; how many, and whether at all, is chosen by what pays."""

    NONE = "none", "nobody"
    MTP = "mtp", "the model's own draft head"
    LOOKUP = "lookup", "what followed earlier in the text"
    AUTO = "auto", "the head if there is one, else lookup"


class Pooling(models.TextChoices):
    """What an engine makes of a model's last layer. The names are llama.cpp's."""

    NONE = "", "nothing: it generates text"
    MEAN = "mean", "embeddings, the mean of all tokens"
    CLS = "cls", "embeddings, the first token"
    LAST = "last", "embeddings, the last token"
    RANK = "rank", "relevance scores of query and document"
