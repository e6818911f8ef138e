"""How models are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pools.errors import ModelUnknown
from pools.hub import carries_quant
from pools.hub_catalogue import HUB_MODELS, entry_of, known_names, lookup_hub
from pools.model_reference import (
    HubReference,
    NameReference,
    PathReference,
    ReferenceInvalid,
    UrlReference,
    parse_reference,
)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("smollm2-135m", NameReference("smollm2-135m")),
        ("qwen3.6-35b-a3b:UD-Q3_K_M", NameReference("qwen3.6-35b-a3b", "UD-Q3_K_M")),
        ("hf:own/tiny/tiny-Q4_K_M.gguf", HubReference("own/tiny", "tiny-Q4_K_M.gguf")),
        ("hf:own/tiny/sub/tiny.gguf@v1.0", HubReference("own/tiny", "sub/tiny.gguf", revision="v1.0")),
        ("hf:own/tiny:UD-Q4_K_XL", HubReference("own/tiny", quant="UD-Q4_K_XL")),
        ("hf:own/tiny", HubReference("own/tiny")),
        (
            "https://huggingface.co/own/tiny/blob/main/sub/tiny.gguf?download=true",
            HubReference("own/tiny", "sub/tiny.gguf"),
        ),
        ("https://models.example/a%20b.gguf?x=1", UrlReference("https://models.example/a%20b.gguf?x=1")),
        ("http://127.0.0.1:8000/m.gguf", UrlReference("http://127.0.0.1:8000/m.gguf")),
        ("./m.gguf", PathReference("./m.gguf")),
        ("/models/m.bin", PathReference("/models/m.bin")),
        ("m.gguf", PathReference("m.gguf")),
    ],
)
def test_a_reference_is_read_and_written_the_same(text: str, reference: object) -> None:
    assert parse_reference(text) == reference
    assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "hf:",
        "hf:tiny",
        "hf:own/tiny/readme.md",
        "hf:own/../x.gguf",
        "hf:own/tiny/../../x.gguf",
        "hf:own/tiny/x.gguf@",
        "https:///m.gguf",
        "https://models.example/",
        "https://models.example:0/m.gguf",
        # Each would be written elsewhere than below the models' folder, or could not be written at all.
        "hf:own/tiny//etc/x.gguf",
        "hf:own/tiny/./x.gguf",
        "hf:own/tiny/a\\b.gguf",
        "hf:own/tiny/x.gguf@../../main",
        "https://models.example/a%00b.gguf",
        "https://models.example/a%0Ab.gguf",
        "https://models.example/" + "n" * 250 + ".gguf",
        # Passwords would stand in rows and on pages.
        "https://user:secret@models.example/m.gguf",
        "a b",
        "x\ny",
        "n" * 3000,
    ],
)
def test_what_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(ReferenceInvalid):
        parse_reference(text)


@given(st.text(max_size=80))
def test_any_text_is_a_reference_or_refused(text: str) -> None:
    try:
        reference = parse_reference(text)
    except ReferenceInvalid:
        return
    assert parse_reference(str(reference)) == reference


def test_a_url_has_the_name_of_its_file() -> None:
    reference = parse_reference("https://models.example/dir/a%20b.gguf?x=1")
    assert isinstance(reference, UrlReference)
    assert reference.file_name == "a b.gguf"


def test_quants_are_told_apart_in_file_names() -> None:
    assert carries_quant("Qwen3.6-27B-Q4_K_M.gguf", "q4_k_m")
    assert carries_quant("sub/x.Q4_K_M.gguf", "Q4_K_M")
    assert not carries_quant("Qwen3.6-27B-UD-Q4_K_M.gguf", "Q4_K_M")
    assert carries_quant("Qwen3.6-27B-UD-Q4_K_M.gguf", "UD-Q4_K_M")
    assert not carries_quant("x-Q4_K_M.gguf", "Q4_K")
    assert carries_quant("x.gguf", "")


def test_the_catalogue_names_each_file_once_and_finds_it_again() -> None:
    names = known_names()
    assert len(set(names)) == len(names)
    for model in HUB_MODELS:
        assert lookup_hub(model.name) is model
        for variant in model.variants:
            assert model.variant(variant.quant.lower()) is variant
            assert entry_of(model.reference(variant)) == (model, variant)
            assert parse_reference(f"{model.name}:{variant.quant}") == NameReference(model.name, variant.quant)
            assert carries_quant(variant.file, variant.quant)
        with pytest.raises(ModelUnknown, match=f"known: {model.name}:"):
            model.variant("Q1_0")
    assert lookup_hub("gpt-17") is None
    assert entry_of(HubReference("own/tiny", "tiny.gguf")) is None
