"""Clusters: what is refused, what is found, and that every figure says where it comes from."""
import dataclasses
import json
from pathlib import Path

import pytest

from analyzer.errors import DuplicateRegistrationError, InputError, UnknownDeviceError
from analyzer.hardware import ClusterSpec, DeviceSpec, LinkSpec, cluster_of, find_cluster, find_device, register_cluster

CLUSTERS = list(register_cluster)


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.name)
def test_a_cluster_names_the_source_of_every_figure_and_survives_json(cluster: ClusterSpec) -> None:
    for figure in cluster.figures():
        assert figure.value is None or figure.source or figure.name == "host_link.devices", figure
    assert ClusterSpec.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert find_cluster(cluster.name) is cluster
    assert all(find_cluster(alias) is cluster for alias in cluster.aliases)


@pytest.mark.parametrize(("name", "bandwidths"), [
    ("dgx_a100", (300e9, 32e9, 25e9)), ("dgx_h100", (450e9, 64e9, 50e9)), ("dgx_b200", (900e9, 64e9, 50e9)),
    ("p4d.24xlarge", (300e9, 32e9, 6.25e9)),   # 400 Gb/s among 8
    ("a3-megagpu-8g", (450e9, 64e9, 25e9)),    # 8 x 200 Gb/s
    ("a100_pcie_pairs", (300e9, 32e9, None)), ("l40s_box", (None, 32e9, None))])
def test_figures_are_those_of_the_documents(name: str, bandwidths: tuple[float | None, ...]) -> None:
    cluster = find_cluster(name)
    assert tuple(link and link.bandwidth for link in (cluster.link, cluster.host_link, cluster.fabric)) == bandwidths


def test_links_are_no_faster_than_the_device_says() -> None:
    for cluster in CLUSTERS:
        limit = cluster.device.nvlink_bandwidth
        if cluster.link is not None and limit is not None:
            assert cluster.link.bandwidth <= limit, cluster


@pytest.mark.parametrize(("device", "kind", "devices", "reduces"), [
    ("a100", "nvswitch", 8, False), ("h100", "nvswitch", 8, True), ("b200", "nvswitch", 8, True),
    ("gb200", "nvswitch", 72, True), ("mi300x", "infinity_fabric", 8, False),
    ("v100_sxm2_32gb", "nvlink_mesh", 8, False)])
def test_the_usual_cluster_of_a_device(device: str, kind: str, devices: int, reduces: bool) -> None:
    link = cluster_of(device).link
    assert link is not None
    assert (link.kind, link.devices, link.reduces_in_switch) == (kind, devices, reduces)


@pytest.mark.parametrize("device", ["l40s", "t4", "a100_80gb_pcie", "rtx_4090"])
def test_a_card_without_links_uses_its_bus(device: str) -> None:
    cluster = cluster_of(device)
    assert cluster.link is None
    assert cluster.host_link is not None and cluster.host_link.kind == "pcie"
    assert cluster.fabric is not None and "assumed" in cluster.fabric.sources["bandwidth"]


def test_a_device_of_ones_own_has_a_usual_cluster() -> None:
    cluster = cluster_of(DeviceSpec("mine", nvlink_bandwidth=200e9, compute_capability=(9, 0)))
    assert cluster.link is not None and (cluster.link.kind, cluster.link.bandwidth) == ("nvswitch", 200e9)
    assert cluster.host_link is None


@pytest.mark.parametrize(("make", "message"), [
    (lambda: find_cluster("dgx_h10"), "unknown cluster 'dgx_h10': did you mean 'dgx_h100'"),
    (lambda: find_cluster(8), "find_cluster(8): takes a name"),
    (lambda: register_cluster("x"), "register_cluster('x'): takes a ClusterSpec"),
    (lambda: LinkSpec("wifi", 1e9), "LinkSpec(kind='wifi'): must be one of 'nvswitch'"),
    (lambda: LinkSpec("pcie", 0), "LinkSpec(bandwidth=0): must be a positive number, in B/s"),
    (lambda: LinkSpec("pcie", 1e9, devices=1), "LinkSpec(devices=1): must be an int of 2 or more"),
    (lambda: LinkSpec("pcie", 1e9, sources={"bandwith": "x"}), "not a figure, did you mean 'bandwidth'?"),
    (lambda: LinkSpec.from_dict({"kind": "pcie"}), "has no 'bandwidth'"),
    (lambda: LinkSpec.from_dict({"kin": "pcie"}), "unknown field 'kin', did you mean 'kind'?"),
    (lambda: ClusterSpec(" ", find_device("l4")), "ClusterSpec(name=' '): must be a name that is not blank"),
    (lambda: ClusterSpec("x", "l4"), "ClusterSpec('x', device='l4'): must be a DeviceSpec"),  # type: ignore[arg-type]
    (lambda: ClusterSpec("x", find_device("l4"), 0), "ClusterSpec('x', devices_per_host=0): must be an int of 1"),
    (lambda: ClusterSpec("x", find_device("l4"), link=1e9), "must be a LinkSpec"),  # type: ignore[arg-type]
    (lambda: ClusterSpec("x", find_device("l4"), sources={"link": "x"}), "a link's sources stand in its LinkSpec"),
    (lambda: ClusterSpec.from_dict({"name": "x", "device": "l4", "fabrik": None}), "did you mean 'fabric'?")])
def test_bad_input_is_repeated_with_the_way_out(make, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value)


def test_registration_refuses_taken_names_and_is_undone() -> None:
    mine = ClusterSpec("mine", find_device("l4"), 2)
    with register_cluster.scope():
        register_cluster(mine)
        assert find_cluster("Mine") is mine
        with pytest.raises(DuplicateRegistrationError, match="'dgx_h100' already stands for"):
            register_cluster(dataclasses.replace(mine, name="other", aliases=("dgx_h100",)))
    with pytest.raises(InputError):
        find_cluster("mine")


def test_a_file_describes_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    path.write_text(json.dumps({"name": "lab", "device": "h100", "devices_per_host": 4,
                                "fabric": {"kind": "ethernet", "bandwidth": 12.5e9}}))
    cluster = find_cluster(str(path))
    assert (cluster.device.name, cluster.devices_per_host, cluster.link) == ("h100_sxm", 4, None)
    assert cluster.fabric == LinkSpec("ethernet", 12.5e9)
    for text, message in (("{", "cannot be read as JSON"), ("[]", "holds a list"),
                          ('{"name": "x"}', "has no 'device'")):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            find_cluster(str(path))
    with pytest.raises(InputError, match="cannot be read as JSON"):
        find_cluster(str(tmp_path / "none.json"))


def test_a_cluster_of_a_scope_ends_with_it():
    before = cluster_of("gb200")
    with register_cluster.scope():
        register_cluster(dataclasses.replace(find_cluster("gb200_nvl72"), devices_per_host=2), override=True)
        assert cluster_of("gb200").devices_per_host == 2
    assert cluster_of("gb200") == before


@pytest.mark.parametrize(("name", "device", "per_host", "rates"), [
    ("dgx_h100,fabric=25e9", "h100_sxm", 8, {"fabric": 25e9, "link": 450e9}),
    ("h100, fabric = 25e9, devices_per_host=4", "h100_sxm", 4, {"fabric": 25e9, "link": 450e9}),
    ("h100_sxm,power=500,link=200e9", "h100_sxm,power=500", 8, {"link": 200e9, "fabric": 50e9}),
    ("gb200,fabric=100e9", "gb200", 4, {"fabric": 100e9, "link": 900e9}),
    ("l40s,link=112e9", "l40s", 8, {"link": 112e9, "host_link": 32e9})])
def test_figures_may_follow_the_name_of_a_cluster_or_of_a_device(name: str, device: str, per_host: int,
                                                                 rates: dict[str, float]) -> None:
    """What is told has the text as its source; the rest is that of the cluster, or of the device's usual hosts."""
    cluster = find_cluster(name)
    assert (cluster.name, cluster.device.name, cluster.devices_per_host) == (name, device, per_host)
    assert {link: getattr(cluster, link).bandwidth for link in rates} == rates
    told = [link for link in rates if f"{link}=" in name.replace(" ", "")]
    assert {getattr(cluster, link).sources["bandwidth"] for link in told} == {f"told by {name!r}"}


@pytest.mark.parametrize(("name", "said"), [
    ("dgx_h100,fabric=fast", "cluster 'dgx_h100,fabric=fast': fabric=fast must be a number, in B/s of one device"),
    ("h100,devices_per_host=2.5", "cluster 'h100,devices_per_host=2.5': devices_per_host=2.5 must be a number"),
    ("dgx_h100,fabrik=1e9", "'fabrik' is no figure of a board"), ("h1,fabric=1e9", "unknown device 'h1'"),
    ("h100,fabric=-1", "LinkSpec(bandwidth=-1.0): must be a positive number, in B/s")])
def test_a_figure_that_cannot_be_says_why(name: str, said: str) -> None:
    with pytest.raises((InputError, UnknownDeviceError)) as error:
        find_cluster(name)
    assert said in str(error.value)
