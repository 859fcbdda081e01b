import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import InputError
from analyzer.zoo.input_spec import DTYPES, InputSpec, parse_input, parse_inputs


@pytest.mark.parametrize(("text", "name", "dtype", "shape"), [
    ("8x3x224x224", None, torch.float32, (8, 3, 224, 224)), ("7", None, torch.float32, (7,)),
    ("scalar", None, torch.float32, ()), ("int64:8x512", None, torch.int64, (8, 512)),
    ("input_ids=int64:8x512", "input_ids", torch.int64, (8, 512)), ("x=bf16:2x3", "x", torch.bfloat16, (2, 3)),
    ("x=2x3", "x", torch.float32, (2, 3)), ("step=long:scalar", "step", torch.int64, ()),
    ("mask=bool:4", "mask", torch.bool, (4,)), ("x=float8_e4m3fn:4", "x", torch.float8_e4m3fn, (4,)),
    ("x=complex64:4", "x", torch.complex64, (4,))])
def test_parses(text: str, name: str | None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert parse_input(text) == InputSpec(name, dtype, shape)


@given(st.none() | st.from_regex(r"[a-z_][a-z_0-9]{0,8}", fullmatch=True),
       st.sampled_from(sorted(set(DTYPES.values()), key=str)), st.lists(st.integers(1, 10**6), max_size=5).map(tuple))
def test_text_of_a_spec_parses_back(name: str | None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    spec = InputSpec(name, dtype, shape)
    assert parse_input(str(spec)) == spec


@given(st.text(max_size=20))
def test_any_text_parses_or_is_refused_with_its_own_words(text: str) -> None:
    try:
        spec = parse_input(text)
    except InputError as error:
        assert text in str(error)
    else:
        assert parse_input(str(spec)) == spec


def test_makes_a_tensor_without_data() -> None:
    tensor = parse_input("ids=int64:1000000x1000000").make()
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((10**6, 10**6), torch.int64, "meta")
    assert parse_input("2x3").make("cpu").device.type == "cpu"


@pytest.mark.parametrize(("text", "message"), [
    ("8,3,224,224", "--input 8,3,224,224: '8,3,224,224' is no shape; did you mean 8x3x224x224?"),
    ("(8, 3)", "--input (8, 3): '(8, 3)' is no shape; did you mean 8x3?"),
    ("8X3", "--input 8X3: '8X3' is no shape; did you mean 8x3?"),
    ("batch", "--input batch: 'batch' is no shape; write [NAME=][DTYPE:]SIZES, like 8x3x224x224 or "
              "input_ids=int64:8x512"),
    ("", "--input : '' is no shape; write [NAME=]"),
    ("8x", "'8x' is no shape"),
    ("8x-1", "'8x-1' is no shape"),
    ("٣x3", "'٣x3' is no shape"),  # a digit to Python's int, but not to a reader
    ("8x0x3", "--input 8x0x3: a size of 0 leaves nothing to profile; every size must be at least 1"),
    ("x=int46:8", "--input x=int46:8: unknown dtype 'int46'; did you mean int64"),
    ("x=quux:8", "--input x=quux:8: unknown dtype 'quux'; take one of torch's, like float32, bfloat16 or int64"),
    (":8", "--input :8: unknown dtype ''"),
    ("1x=8", "--input 1x=8: '1x' is no argument name"),
    ("=8", "--input =8: '' is no argument name"),
    ("a=b=8", "--input a=b=8: 'a=b' is no argument name")])
def test_refuses(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_input(text)
    assert message in str(caught.value)


def test_parses_several_in_their_order() -> None:
    specs = parse_inputs(["2x3", "mask=bool:2", "4"])
    assert [(spec.name, spec.shape) for spec in specs] == [(None, (2, 3)), ("mask", (2,)), (None, (4,))]
    assert parse_inputs([]) == ()


def test_refuses_a_name_given_twice() -> None:
    with pytest.raises(InputError, match="--input x=int64:3: 'x' is given twice"):
        parse_inputs(["x=2", "x=int64:3"])
