"""Profiles written by hand, every figure derived in the comment beside it, the golden files, and a browser."""
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from analyzer.api.result import Profile
from analyzer.report.page.document import unpack
from analyzer.results.info import (
    CostInfo,
    HolderInfo,
    MemoryEvent,
    ModuleCall,
    ModuleInfo,
    OperatorInfo,
    OutOfMemoryInfo,
    PhaseInfo,
    TimelinePoint,
    UncountedInfo,
)
from analyzer.results.lane import SpanInfo
from analyzer.results.node_info import NodeInfo, TensorInfo

GOLDEN = Path(__file__).parent / "golden"
HIDDEN = TensorInfo((8, 32), "float32", "cuda:0")   # 1024 bytes
LOGITS = TensorInfo((8, 4), "float32", "cuda:0")    # 128 bytes
X = TensorInfo((8, 16), "float32", "cuda:0")        # 512 bytes
BASE = 0x7F0000000000
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
#: Where screenshots are kept to be looked at; nowhere unless it is set.
SHOTS = os.environ.get("ANALYZER_SCREENSHOTS")


class Read(HTMLParser):
    """The texts outside of scripts of HTML whose elements are closed in their order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" not in self.open:
            self.texts.append(data)


def facts(page: str, kind: str) -> dict[str, Any]:
    """The data of the part of that kind."""
    return next(part["data"] for part in unpack(page) if part["kind"] == kind)


@pytest.fixture
def check_golden():
    """Compare text with a golden file; ANALYZER_UPDATE_GOLDEN=1 writes the file instead."""
    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if os.environ.get("ANALYZER_UPDATE_GOLDEN"):
            path.write_text(text + "\n", encoding="utf-8")
        assert text + "\n" == path.read_text(encoding="utf-8")
    return check


def node(op, name, path, costs, **more) -> NodeInfo:
    names = ("accumulate_bytes", "incremental_bytes", "output_bytes", "temp_bytes", "param_bytes", "backward_bytes",
             "fwd_flops", "bwd_flops", "fwd_macs", "bwd_macs")
    return NodeInfo(op, name, more.pop("target", name), path, **dict(zip(names, costs, strict=True)), **more)


@pytest.fixture
def vit_rows() -> list[NodeInfo]:
    """Rows of ViT-B/16 at batch 8 (197 tokens of 768, hidden 3072): bytes are 4 x elements, FLOPs 2 x MACs."""
    image = 8 * 3 * 224 * 224 * 4
    tokens, hidden = 8 * 197 * 768 * 4, 8 * 197 * 3072 * 4
    patch_macs = 8 * 14 * 14 * 768 * 3 * 16 * 16
    mlp_macs = 8 * 197 * 768 * 3072
    head_macs = 8 * 768 * 1000
    rows = [
        ("placeholder", "input_1", image, image, 0, 0, 0, 0),
        # the image asks for no gradient, so backward makes the weight's alone
        ("call_module", "conv_proj", 0, 0, 8 * 768 * 14 * 14 * 4, (768 * 3 * 16 * 16 + 768) * 4, patch_macs, patch_macs
         ),
        ("call_module", "encoder_layers_encoder_layer_0_ln_2", tokens, tokens, 0, 2 * 768 * 4, 0, 0),
        ("call_module", "encoder_layers_encoder_layer_0_mlp_0", hidden, hidden, 0, (768 * 3072 + 3072) * 4, mlp_macs,
         2 * mlp_macs),
        ("call_module", "encoder_layers_encoder_layer_0_mlp_1", hidden, hidden, 0, 0, 0, 0),
        ("call_module", "encoder_layers_encoder_layer_0_mlp_3", 0, 0, tokens, (3072 * 768 + 768) * 4, mlp_macs,
         2 * mlp_macs),
        ("call_module", "heads_head", 0, 0, 8 * 1000 * 4, (768 * 1000 + 1000) * 4, head_macs, 2 * head_macs),
        ("output", "output", 0, 0, 0, 0, 0, 0),
    ]
    accumulated = 0
    result = []
    for op, name, incremental, output, temp, param, fwd_macs, bwd_macs in rows:
        accumulated += incremental
        path = name.replace("_layers_", ".layers.").replace("layer_0_", "layer_0.") if "layer_0" in name else ""
        backward = {"input_1": 0, "conv_proj": 0, "heads_head": 8 * 768 * 4, "output": 0}.get(
            name, temp and hidden or tokens)
        result.append(node(op, name, path, (accumulated, incremental, output, temp, param, backward,
                                            2 * fwd_macs, 2 * bwd_macs, fwd_macs, bwd_macs)))
    return result


@pytest.fixture
def mlp() -> Profile:
    """A training step of x[8,16] -> Linear(16, 32) -> ReLU -> Linear(32, 4) -> * 2 with every field filled."""
    fc1 = 8 * 16 * 32   # MACs; x asks for no gradient, so backward does as many again
    fc2 = 8 * 32 * 4    # MACs; backward does twice as many
    nodes = (
        node("placeholder", "x", "", (512, 512, 512, 0, 0, 0, 0, 0, 0, 0), outputs=(X, ), fwd_seconds=0.0,
             bwd_seconds=0.0),
        node("call_module", "fc1", "body.0", (512, 0, 0, 1024, 4 * 544, 0, 2 * fc1, 2 * fc1, fc1, fc1), target="body.0",
             inputs=("x", ), outputs=(HIDDEN, ), fwd_seconds=2e-6, bwd_seconds=3e-6, source="net.py:12"),
        # one FLOP an element forward, one backward
        node("call_module", "act", "body.1", (1536, 1024, 1024, 0, 0, 1024, 256, 256, 0, 0), target="body.1",
             inputs=("fc1", ), outputs=(HIDDEN, ), fwd_seconds=1e-6, bwd_seconds=1e-6,
             region=("no_sync", {"kind": "autocast", "id": 1})),
        node("call_module", "fc2", "fc2", (1536, 0, 0, 128, 4 * 132, 1024, 2 * fc2, 4 * fc2, fc2, 2 * fc2),
             inputs=("act", ), outputs=(LOGITS, ), fwd_seconds=2e-6, bwd_seconds=4e-6, buffer_bytes=0),
        node("call_function", "mul", "", (1536, 0, 0, 128, 0, 128, 32, 32, 0, 0), target="operator.mul",
             inputs=("fc2", ), outputs=(LOGITS, ), fwd_seconds=None, bwd_seconds=1e-6),
        node("output", "output", "", (1536, 0, 0, 0, 0, 0, 0, 0, 0, 0), inputs=("mul", ), outputs=(LOGITS, ),
             aliases=("mul", )),
    )

    def cost(params, flops, bwd_flops, macs, bwd_macs, activation, saved, fwd_seconds, bwd_seconds):
        # forward reads weights and an input as large as its output; backward reads those and a gradient, and writes
        # gradients
        return CostInfo(
            params=params, trainable_params=params, param_bytes=4 * params, buffer_bytes=0, fwd_flops=flops,
            bwd_flops=bwd_flops, fwd_macs=macs, bwd_macs=bwd_macs, fwd_comm_bytes=0, bwd_comm_bytes=0,
            recompute_flops=0, fwd_read_bytes=4 * params + activation, fwd_written_bytes=activation,
            bwd_read_bytes=4 * params + 2 * activation, bwd_written_bytes=4 * params + activation,
            activation_bytes=activation, saved_bytes=saved, fwd_seconds=fwd_seconds, bwd_seconds=bwd_seconds,
            optimizer_seconds=params * 2.0**-30, launch_seconds=0.0,
            arithmetic_seconds=fwd_seconds if fwd_seconds is None else fwd_seconds + bwd_seconds, memory_seconds=0.0,
            latency_seconds=0.0, communication_seconds=0.0, exposed_comm_seconds=0.0, error_seconds=0.0)

    nothing = cost(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)

    def module(path, kind, depth, own, children=(), **more):
        total = own
        for child in children:
            total = total + child
        return ModuleInfo(path=path, type=kind, depth=depth, own=own, children=tuple(children), calls=1, training=True,
                          **{name: getattr(total, name) for name in CostInfo.__slots__}, **more)

    linear1 = module(
        "body.0", "Linear", 2, cost(544, 2 * fc1, 2 * fc1, fc1, fc1, 1024, 0, 2e-6, 3e-6), inputs=(X, ),
        outputs=(HIDDEN, ), output_bytes=1024, extra_repr="in_features=16, out_features=32, bias=True", parameters={
            "weight": TensorInfo((32, 16), "float32", "cuda:0"), "bias": TensorInfo((32, ), "float32", "cuda:0")
        }, operators=(OperatorInfo("aten.addmm", 1, 2 * fc1, fc1, 2e-6), ))
    act = module("body.1", "ReLU", 2, cost(0, 256, 256, 0, 0, 1024, 1024, 1e-6, 1e-6))
    again = module("again", "ReLU", 1, nothing, shared_with="body.1")
    body = module("body", "Sequential", 1, nothing, (linear1, act))
    linear2 = module("fc2", "Linear", 1, cost(132, 2 * fc2, 4 * fc2, fc2, 2 * fc2, 128, 0, 2e-6, 4e-6))
    root = module("", "Net", 0, cost(0, 32, 32, 0, 0, 128, 0, None, 1e-6), (body, linear2, again))

    calls = (ModuleCall("", None, (X, ), (LOGITS, )), ModuleCall("body", 0, (X, ), (HIDDEN, )),
             ModuleCall("body.0", 1, (X, ), (HIDDEN, ), 2e-6), ModuleCall(
                 "body.1", 1, (HIDDEN, ), (HIDDEN, ), 1e-6), ModuleCall("fc2", 0, (HIDDEN, ), (LOGITS, ), 2e-6))
    steady = {
        "forward": PhaseInfo(8192, 2097152, 9216, 2097152, 10528, fc1 + fc2, 0, 5e-6, 4e-6),
        "backward": PhaseInfo(9728, 2097152, 12288, 2097152, 12576, fc1 + 2 * fc2, 0, 9e-6, 8e-6),
        "optimizer": PhaseInfo(9728, 2097152, 10240, 2097152, 2704, 0, 0, None, None),
        "zero_grad": PhaseInfo(5632, 2097152, 9728, 2097152, 0, 0, 0, 0.0, 0.0),
    }
    events = (
        MemoryEvent("segment_alloc", BASE, 2 * 2**20),
        MemoryEvent("alloc", BASE, 2048, "body.0.weight", "parameter", requested_bytes=1600),
        MemoryEvent("alloc", BASE + 2048, 1024, "fc1", "activation"),
        MemoryEvent("alloc", BASE + 3072, 1024, "act", "activation"),
        MemoryEvent("free", BASE + 2048, 1024, "fc1", "activation"),
        MemoryEvent("alloc", BASE + 2048, 512, "fc2", "temporary"),
        MemoryEvent("free", BASE + 3072, 1024, "act", "activation"),
    )
    return Profile(
        name="Net", mode="train", device="h200", optimizer="adam", autocast="bfloat16", inputs={"x": X}, batch_size=8,
        world_size=4, data_parallel_size=2, model_parallel_size=2, torch_version="2.13.0", analyzer_version="0.1.0",
        params=676, param_bytes=2704, buffer_bytes=0, optimizer_bytes=5408, fwd_flops=10528, bwd_flops=12576,
        fwd_macs=fc1 + fc2, bwd_macs=fc1 + 2 * fc2, recompute_flops=0, recompute_macs=0,
        executed_flops=10528 + 12576, optimizer_flops=None, peak_allocated_bytes=12288, peak_reserved_bytes=2097152,
        uncounted=(UncountedInfo("mylib.scan", 2, 4096), UncountedInfo("mylib.sort", 1)),
        peak_by_category={"activations": 1536, "parameters": 2704, "optimizer states": 5408, "gradients": 2640},
        holders=(HolderInfo("adam", "", "optimizer states", 5408, 8), HolderInfo("fc1", "body.0", "parameters", 2176)),
        first_step={"forward": PhaseInfo(3584, None, 4608, 2097152)}, phases=steady,
        timeline=(TimelinePoint("fc1", 4096, "forward", 2097152, 3, 2e-6), TimelinePoint(7, 9216, "forward", 2097152),
                  TimelinePoint("fc2", 8192, "forward", 2097152),
                  TimelinePoint("backward of fc2", 12288, "backward", 2097152),
                  TimelinePoint("fc1", 9728, "backward", 2097152), TimelinePoint("step", 10240, "optimizer", 2097152)),
        memory_events=events, fwd_seconds=5e-6, bwd_seconds=9e-6, optimizer_seconds=1e-6, step_seconds=15e-6,
        kernel_seconds=None, nodes=nodes, modules=root, module_calls=calls,
        assumptions=("torch.compile is ignored", "a mask of unknown content is taken as dense"),
        spans=(SpanInfo("host", "launch", "fc1", "aten.addmm.default", "fc1", "body.0", "forward", 0.0, 2e-6),
               SpanInfo("compute", "kernel", "fc1", "aten.addmm.default", "fc1", "body.0", "forward", 2e-6, 2e-6, 0)))


@pytest.fixture
def out_of_memory() -> OutOfMemoryInfo:
    return OutOfMemoryInfo("aten.mm", "backward", 2 * 2**30, 2**29, "fc1", "body.0", 70 * 2**30, 78 * 2**30, 80 * 2**30)


@pytest.fixture
def bare() -> Profile:
    """A profile of which nothing is known."""
    return Profile(name="bare", mode="infer")


@pytest.fixture
def read_table():
    """A printed table as rows of cells, each heading to its cell; a column starts where its dashes do."""
    def read(text: str) -> list[dict[str, str]]:
        heading, rule, body = re.split(r"^([- ]*--[- ]*)$", text, maxsplit=1, flags=re.MULTILINE)
        lines = body.splitlines()
        spans = [match.span() for match in re.finditer("-+", rule)]
        starts = [0] + [end for _, end in spans[:-1]]
        ends = [end for _, end in spans[:-1]] + [None]
        names = [" ".join(line[start:end].strip() for line in heading.splitlines()).strip()
                 for start, end in zip(starts, ends, strict=True)]
        assert len(set(names)) == len(names)
        return [
            dict(zip(names, (line[start:end].strip() for start, end in zip(starts, ends, strict=True)), strict=True))
            for line in lines if line.strip("- ")
        ]
    return read


@pytest.fixture(scope="module")  # its event loop is that of the thread, in which other files run loops of their own
def browser():
    """Chromium; tests are skipped where there is none (Debian: apt-get install chromium)."""
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def show(browser, tmp_path):
    """Open the page of a record; what it says to the console as an error or warning, and what it asks for, must be
    nothing.
    """
    heard: list[str] = []
    opened = []

    def open_page(record, width=1400, scheme="light"):
        path = tmp_path / "page.html"
        record.to_html(path)
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        opened.append(context)
        page = context.new_page()
        page.on("console", lambda said: heard.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda asked: heard.append(asked.url) if asked.url != path.as_uri() else None)
        page.goto(path.as_uri())
        page.wait_for_selector(".chart .main-svg")
        return page

    yield open_page
    for context in opened:
        context.close()
    assert heard == []


@pytest.fixture
def draw_all():
    """Scroll through a page, so that every part that is in sight is drawn."""
    def draw(page):
        for section in page.query_selector_all("section.part"):
            if section.is_visible():
                section.scroll_into_view_if_needed()
        page.wait_for_function("""[...document.querySelectorAll("section.part .body")].every(
            (body) => !body.offsetParent || body.childElementCount && (!body.querySelector(".chart")
                                                                       || body.querySelector(".main-svg")))""")
    return draw


@pytest.fixture
def keep_shot():
    """Keep a picture of a whole page, where pictures are kept."""
    def keep(page, name):
        if SHOTS:
            Path(SHOTS).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=str(Path(SHOTS) / f"{name}.png"), full_page=True)
    return keep
