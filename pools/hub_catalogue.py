"""Models of the catalogue that come from a hub: which repository, which files, and for whom they are.

Repositories and files were looked up in public documentation and code, and nothing here was fetched: an entry counts as
unverified until a download of it has been checked on the host that made it. The hub tells a file's size and SHA-256 before the
download; a digest that stands here was published elsewhere and must agree with it.
"""

from dataclasses import dataclass, field

from pools.errors import ModelUnknown
from pools.generation_defaults import GenerationDefaults
from pools.model_reference import HubReference


@dataclass(frozen=True)
class HubVariant:
    """One file: its quant as the publisher calls it, about how large it is (0: unknown), and who it is for."""

    quant: str
    file: str
    about_bytes: int = 0
    note: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class HubModel:
    """A model in one repository. `kv_family` names the quants that may share KV, if an owner lets them (see Model)."""

    name: str
    display_name: str
    licence: str
    repo: str
    variants: tuple[HubVariant, ...]
    projector: str = ""
    kv_family: str = ""
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)

    def variant(self, quant: str = "") -> HubVariant:
        """The variant of this quant, whatever its case; the first one for "". Raises ModelUnknown."""
        for variant in self.variants:
            if not quant or variant.quant.lower() == quant.lower():
                return variant
        raise ModelUnknown(f"{self.name}:{quant}", (f"{self.name}:{variant.quant}" for variant in self.variants))

    def reference(self, variant: HubVariant) -> HubReference:
        return HubReference(self.repo, variant.file)


_GIB = 1 << 30
_P100, _RTX_3060, _RTX_5060_TI = "a P100 (16 GB)", "an RTX 3060 (12 GB)", "an RTX 5060 Ti (16 GB)"
# As the makers recommend for thinking in general: temperature 1.0, top_p 0.95, top_k 20, min_p 0.
_THINKING = GenerationDefaults(temperature=1.0, top_p=0.95, top_k=20, min_p=0.0)

HUB_MODELS: tuple[HubModel, ...] = (
    HubModel(
        name="qwen3.6-27b",
        display_name="Qwen 3.6 27B",
        licence="Apache-2.0",
        repo="unsloth/Qwen3.6-27B-GGUF",
        projector="mmproj-F16.gguf",
        kv_family="qwen3.6-27b",
        defaults=_THINKING,
        variants=(
            HubVariant(
                "UD-IQ3_XXS", "Qwen3.6-27B-UD-IQ3_XXS.gguf", 12 * _GIB, f"{_P100} or {_RTX_5060_TI} with long context"
            ),
            HubVariant("UD-IQ2_XXS", "Qwen3.6-27B-UD-IQ2_XXS.gguf", 9_626 << 20, f"{_RTX_3060}, at a cost in quality"),
            HubVariant("Q3_K_M", "Qwen3.6-27B-Q3_K_M.gguf", 13_586_217_184, f"{_P100} or {_RTX_5060_TI}"),
            HubVariant(
                "UD-Q3_K_XL",
                "Qwen3.6-27B-UD-Q3_K_XL.gguf",
                14_500_000_000,
                f"{_P100} or {_RTX_5060_TI} with short context",
            ),
            HubVariant("Q4_K_M", "Qwen3.6-27B-Q4_K_M.gguf", 0, "two cards, or a card of 24 GB"),
        ),
    ),
    HubModel(
        name="qwen3.6-27b-mtp",
        display_name="Qwen 3.6 27B with its draft head",
        licence="Apache-2.0",
        repo="unsloth/Qwen3.6-27B-MTP-GGUF",
        kv_family="qwen3.6-27b-mtp",
        defaults=_THINKING,
        variants=(
            HubVariant("UD-IQ3_XXS", "Qwen3.6-27B-UD-IQ3_XXS.gguf", 0, f"{_P100} or {_RTX_5060_TI}"),
            HubVariant("UD-Q4_K_XL", "Qwen3.6-27B-UD-Q4_K_XL.gguf", 0, "two cards, or a card of 24 GB"),
        ),
    ),
    HubModel(
        name="qwen3.6-35b-a3b",
        display_name="Qwen 3.6 35B-A3B",
        licence="Apache-2.0",
        repo="unsloth/Qwen3.6-35B-A3B-GGUF",
        projector="mmproj-F16.gguf",
        kv_family="qwen3.6-35b-a3b",
        defaults=_THINKING,
        variants=(
            HubVariant(
                "UD-Q3_K_M",
                "Qwen3.6-35B-A3B-UD-Q3_K_M.gguf",
                16_601_000_000,
                f"{_P100} or {_RTX_5060_TI}, with some experts on the CPU",
                "1b715841683f960bd9a49f008181bd910ee169b78d4cf465b6fde7f4d929ff99",
            ),
            HubVariant(
                "UD-Q2_K_XL",
                "Qwen3.6-35B-A3B-UD-Q2_K_XL.gguf",
                12_300_000_000,
                f"{_P100} or {_RTX_5060_TI} alone; {_RTX_3060} with experts on the CPU",
            ),
            HubVariant(
                "UD-Q4_K_XL",
                "Qwen3.6-35B-A3B-UD-Q4_K_XL.gguf",
                22_850_000_000,
                "any card with 32 GB of memory behind it for experts",
            ),
            HubVariant(
                "UD-Q4_K_M",
                "Qwen3.6-35B-A3B-UD-Q4_K_M.gguf",
                22_135_000_000,
                "any card with 32 GB of memory behind it for experts",
            ),
        ),
    ),
    HubModel(
        name="qwopus3.6-35b-a3b",
        display_name="Qwopus 3.6 35B-A3B",
        licence="Apache-2.0",
        repo="mudler/Qwopus3.6-35B-A3B-v1-APEX-GGUF",
        kv_family="qwopus3.6-35b-a3b",
        defaults=_THINKING,
        variants=(
            HubVariant(
                "I-Mini",
                "Qwopus3.6-35B-A3B-v1-APEX-I-Mini.gguf",
                13_000_000_000,
                f"Q3_K; {_P100} or {_RTX_5060_TI} alone, {_RTX_3060} with experts on the CPU",
            ),
            HubVariant(
                "I-Balanced", "Qwopus3.6-35B-A3B-v1-APEX-I-Balanced.gguf", 0, f"Q5_K; {_P100} with experts on the CPU"
            ),
        ),
    ),
    HubModel(
        name="qwopus3.6-35b-a3b-v1",
        display_name="Qwopus 3.6 35B-A3B, its maker's quants",
        licence="Apache-2.0",
        repo="Jackrong/Qwopus3.6-35B-A3B-v1-GGUF",
        kv_family="qwopus3.6-35b-a3b-v1",
        defaults=_THINKING,
        variants=(
            HubVariant(
                "Q5_K_M", "Qwopus3.6-35B-A3B-v1-Q5_K_M.gguf", 0, "any card with 32 GB of memory behind it for experts"
            ),
            HubVariant("Q8_0", "Qwopus3.6-35B-A3B-v1-Q8_0.gguf", 0, "a card of 48 GB, or to make other quants from"),
        ),
    ),
)


def lookup_hub(name: str) -> HubModel | None:
    """The entry of this name, or None."""
    return next((model for model in HUB_MODELS if model.name == name), None)


def known_names() -> list[str]:
    """Every name with its quant, as `manage.py pull` takes them."""
    return [f"{model.name}:{variant.quant}" for model in HUB_MODELS for variant in model.variants]


def entry_of(reference: HubReference) -> tuple[HubModel, HubVariant] | None:
    """The catalogue's entry of a file, or None for a file that it does not know."""
    for model in HUB_MODELS:
        for variant in model.variants:
            if (model.repo, variant.file) == (reference.repo, reference.file):
                return model, variant
    return None
