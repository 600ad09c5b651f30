"""Real process groups: the same numbers as the virtual runtime, and one clear message when not."""

from __future__ import annotations

from typing import Any

import forked
import live_bytes
import pytest
import transformer
from once import once

Results = list[dict[str, Any]]
# Seconds in which nothing gets on, of all ranks: then they wait for one another without end.
PATIENCE = 240


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What every rank of a group found in all checks; of several test workers one runs them."""
    world: int = request.param
    found: Results = once(
        tmp_path_factory,
        f"gloo-{world}",
        lambda folder: forked.told(
            "gloo.py", world, folder / "store", folder=folder, seconds=PATIENCE
        ),
    )
    return found


# For checks of which one number of ranks is enough.
on_two = pytest.mark.parametrize("ranks", [2], ids=["2 ranks"], indirect=True)
on_three = pytest.mark.parametrize("ranks", [3], ids=["3 ranks"], indirect=True)


def every(ranks: Results, name: str) -> list[Any]:
    """What each rank found in one check; a traceback fails the test."""
    found = [rank[name] for rank in ranks]
    for value in found:
        assert not (isinstance(value, str) and value.startswith("Traceback")), value
    return found


def test_equals_the_virtual_runtime(ranks: Results) -> None:
    """Two terms have one order of summation, so two ranks agree bit for bit."""
    limit = 0.0 if len(ranks) == 2 else 1e-12
    assert max(every(ranks, "seed_equals_virtual")) <= limit


@on_three
def test_manual_collectives_equal_the_virtual_ones(ranks: Results) -> None:
    for found in every(ranks, "manual_collectives"):
        assert max(found.values()) <= 1e-12, found


def test_some_axes_manual_equals_one_device(ranks: Results) -> None:
    for found in every(ranks, "some_axes_manual"):
        assert max(found) <= 1e-12, found


@on_two
def test_single_operations_equal_one_device(ranks: Results) -> None:
    for found in every(ranks, "single_operations"):
        assert max(found.values()) <= 1e-6, found  # one of them goes to float32


def test_scatters_of_a_layer_are_one_call(ranks: Results) -> None:
    """Two layers, unrolled and in a loop, split on several dims into shards of different sizes."""
    for found in every(ranks, "scatters_of_layers"):
        for case, (error, calls) in found.items():
            assert error <= (6e-2 if "bfloat16" in case else 1e-5), (case, error)
            assert calls == 2, (case, calls)


def test_loops_and_branches_by_values_of_all_ranks(ranks: Results) -> None:
    """All ranks run as many iterations, and take the same branches, with the collectives in them."""
    for found in every(ranks, "loops_and_branches"):
        assert found["value"] <= 1e-12 and found["gradient"] <= 1e-12, found
        assert found["steps"][0] == found["steps"][1] > 1, found


def test_one_rank_performs_effects(ranks: Results) -> None:
    """In the order of the source, with whole values; the others perform none."""
    first, *others = every(ranks, "effects")
    assert len(first["alone"][0]) > 4 and first["sharded"] == first["inside"] == first["alone"]
    for found in others:
        assert found["alone"] == first["alone"]
        assert found["sharded"] == found["inside"] == [[], []]


def test_a_scan_along_a_split_dim(ranks: Results) -> None:
    for found in every(ranks, "scans"):
        assert max(found.values()) < 1e-12


def test_checks_name_the_rank(ranks: Results) -> None:
    *others, last = every(ranks, "wrong_values")
    world = len(others) + 1
    said = f"aten.log returned NaN at [1], 1 of 2 values, of finite operands (forward, rank {world - 1})"
    assert said in last["checked"] and not any(found["checked"] for found in others)
    for rank, found in enumerate((*others, last)):
        assert found["asked"].endswith(f"in asked: the least of 0.0 is below 1 (forward, rank {rank})")


def test_sums_of_few_bytes(ranks: Results) -> None:
    """Two ranks exchange what they add up, if it is small: that takes fewer messages, and more memory."""
    exchanged = "all_to_all_single" if len(ranks) == 2 else "all_reduce"
    for found in every(ranks, "sums_of_few_bytes"):
        assert all(exact for exact, _ in found)
        assert [sent for _, sent in found] == [{exchanged: 1}] * 4 + [{"all_reduce": 1}]


@on_two
def test_ranks_measure_one_machine(ranks: Results) -> None:
    """With a link of each collective, by which programs are predicted."""
    one, other = every(ranks, "measured_machine")
    assert one == other
    kinds = ("all_gather", "all_reduce", "all_to_all", "ppermute", "psum_scatter", "send")
    assert one["links"] == ["x", *(f"x/{kind}" for kind in kinds)]
    assert all(0 <= each < 1 for each in one["latencies"])
    assert all(each > 1e4 for each in one["bandwidths"])
    assert one["sent"] == pytest.approx(one["predicted"])


@on_two
def test_threads_that_move_messages_displace_none_that_compute(ranks: Results) -> None:
    for own, *loops in every(ranks, "policies_of_threads"):
        assert own and len(loops) >= 2 and not any(loops)


@on_two
def test_a_rank_that_measures_alone(ranks: Results) -> None:
    mesh, itself = every(ranks, "one_rank_measures_alone")[0]
    assert mesh == (
        "ExchangeError: rank 1 did not report that it called machines.measure(Mesh(x=2)) within 3 s. All "
        "ranks of the mesh are measured at once: call machines.measure(mesh) on every one of them."
    )
    assert itself.startswith("MeshError: measure() measures one process, and this is one of 2: call")


@on_two
def test_caches_are_written_where_they_are(ranks: Results) -> None:
    assert all(every(ranks, "caches_in_place"))


def test_values_are_read_on_ranks(ranks: Results) -> None:
    assert all(every(ranks, "values_read_on_ranks"))


@pytest.mark.parametrize("name", ["seed_equals_one_device", "compiled_seed_equals_one_device"])
def test_equals_one_device(ranks: Results, name: str) -> None:
    assert max(every(ranks, name)) <= 1e-12


@on_two
def test_a_fully_sharded_step_holds_what_it_should(ranks: Results) -> None:
    for found in every(ranks, "bytes_of_a_fully_sharded_step"):
        assert found["peak"] <= live_bytes.allowed(found, len(ranks)), found


def test_exactly_the_expert_s_collectives_run(ranks: Results) -> None:
    expected = (
        {"all_reduce": 2}
        if len(ranks) == 2
        else {"all_gather_into_tensor": 2, "all_to_all_single": 2, "all_reduce": 1}
    )
    assert every(ranks, "collectives_that_really_run") == [expected] * len(ranks)


@on_three
def test_merged_collectives_really_are_one(ranks: Results) -> None:
    per_pass = transformer.LAYERS + 1
    expected = {
        "all_gather_into_tensor": 2 * per_pass,
        "all_to_all_single": per_pass + 1,
        "all_reduce": 2,
    }
    assert [found["ran"] for found in every(ranks, "transformers")] == [expected] * len(ranks)


@on_two
def test_traces_name_each_collective_and_its_wait(ranks: Results) -> None:
    for found in every(ranks, "names_in_a_trace"):
        for case, (plan, sent, waits, others) in found.items():
            assert plan == sent == waits, case
            if case == "fully_sharded":
                layers = {f"block/{i} {phase}" for i in (0, 1) for phase in ("forward", "backward")}
                assert layers | {"step", "block/0/mlp backward"} <= {*others}


@on_two
def test_gathers_note_no_long_name_and_are_waited_for(ranks: Results) -> None:
    """Two threads of gloo's would free the name twice (torch 2.13): `functional/programs/calls.py`."""
    for found in every(ranks, "gathers_by_any_form"):
        assert found.keys() == {"", "eager", "inductor"}
        assert all(each == [["c10d::_allgather_base_"], 0] for each in found.values()), found


@pytest.mark.parametrize(
    "name",
    [
        "small_integers_are_exact",
        "accumulated_over_slices",
        "gradients_of_loops_outside",
        "every_reshard",
        "dtensor_and_back",
        "dtensor_that_is_a_sum",
    ],
)
def test_holds(ranks: Results, name: str) -> None:
    assert every(ranks, name) == [True] * len(ranks)


@on_three
@pytest.mark.parametrize("name", ["every_reduction", "dropout_is_the_same_everywhere"])
def test_holds_on_three(ranks: Results, name: str) -> None:
    assert every(ranks, name) == [True] * 3


@on_two
def test_planned_memory(ranks: Results) -> None:
    assert all(every(ranks, "planned_memory"))


def test_dtensors_without_a_counterpart(ranks: Results) -> None:
    for other, strided, flat in every(ranks, "dtensor_without_a_counterpart"):
        assert other.startswith("PlacementError: the DTensor is on") and "not on Mesh(tp=" in other
        assert (
            strided.startswith("PlacementError") and "no counterpart in a spec; redistr" in strided
        )
        assert "in a way that a DTensor cannot express; redistribute it to plain axis names" in flat


@on_two
@pytest.mark.parametrize("name", ["every_dtype_moves", "every_dtype_adds_up"])
def test_every_dtype(ranks: Results, name: str) -> None:
    assert every(ranks, name) == [[]] * len(ranks)


def test_pipelines(ranks: Results) -> None:
    assert every(ranks, "pipelined") == [[]] * len(ranks)


def test_a_rank_that_compiles_a_pipeline_alone(ranks: Results) -> None:
    for said in every(ranks, "one_rank_compiles"):
        first, *_ = said.splitlines()
        assert first.startswith("PlanMismatch: rank 0 has run by Compile, where rank"), said
        assert first.endswith(("has run as Python.", "have run as Python.")), said


@on_three
def test_neighbours_are_fetched(ranks: Results) -> None:
    assert every(ranks, "neighbours_equal_virtual") == [[]] * len(ranks)


@on_three
def test_ten_steps_of_adamw_track_one_device(ranks: Results) -> None:
    assert max(every(ranks, "ten_steps_of_adamw")) <= 1e-8


def test_from_local_learns_the_shape(ranks: Results) -> None:
    n = len(ranks)
    total = sum(r * 2 * (4 if r < n - 1 else 3) for r in range(n))
    assert every(ranks, "from_local_without_a_shape") == [[4 * n - 1, 2, total]] * n


def test_shards_that_do_not_fit(ranks: Results) -> None:
    """All ranks name the one shard that does not fit; with shape= only the rank that has it looks."""
    last = len(ranks) - 1
    for rank, said in enumerate(every(ranks, "from_local_of_shards_that_do_not_fit")):
        assert all(text.startswith("PlacementError: the shard of rank") for text in said[:4]), said
        long, other, dtype, dims, given = said
        assert "has shape [3, 2], but spec P('tp') of a value of shape" in long
        assert f"rank {last} has shape [3, 3], but" in other and "gives it [3, 2]" in other
        assert f"rank {last} is float64 with 2 dims, the shard of rank 0 is float32 with 2" in dtype
        assert f"rank {last} is float32 with 3 dims" in dims
        want = "PlacementError: the shard of rank 1 has shape [4, 2], but"
        assert given.startswith(want if rank == 1 else "no error"), given


def test_global_norm_counts_each_value_once(ranks: Results) -> None:
    assert max(every(ranks, "norm_counts_each_value_once")) <= 1e-12


def test_mesh_of_another_size_than_the_world(ranks: Results) -> None:
    n = len(ranks)
    for said in every(ranks, "mesh_of_another_size"):
        assert said.startswith(f"MeshError: Mesh(tp={n + 1}) has {n + 1} ranks")
        assert f"the process group has {n}" in said


def test_meshes_that_are_refused(ranks: Results) -> None:
    for rank, (pickled, unnamed, without) in enumerate(every(ranks, "meshes_that_are_refused")):
        assert pickled.startswith("TypeError: Mesh(tp=")
        assert "holds process groups and cannot be pickled; construct it in each process" in pickled
        assert unnamed.startswith("MeshError: the DeviceMesh has no dim names; pass mesh_dim_names")
        assert not rank or without.startswith(f"MeshError: rank {rank} is not part of DeviceMesh(")


def test_threads_that_differ(ranks: Results) -> None:
    for rank, said in enumerate(every(ranks, "threads_that_differ")):
        for kind, text in zip(("OutOfStep", "PlanMismatch"), said, strict=True):
            assert text.startswith(f"{kind}: rank {rank}"), text
            (first, *_), threads = text.splitlines(), ("in thread MainThread", "in thread beside_0")
            assert all(thread in first for thread in threads), text
            assert "from one thread" in text


def test_replicas_that_differ(ranks: Results) -> None:
    for said in every(ranks, "replicas_that_differ"):
        assert said.startswith("ReplicaMismatch: args[1]")
        assert "passed different values" in said and "from_local" in said


def test_placed_replicas_that_differ(ranks: Results) -> None:
    for said in every(ranks, "placed_replicas_that_differ"):
        assert said.startswith("ReplicaMismatch: values['w'] of place")
        assert "place(..., check_replicated=False)" in said


def test_placed_replicas_of_other_kinds(ranks: Results) -> None:
    for rank, (shape, dtype, tree) in enumerate(every(ranks, "placed_replicas_of_other_kinds")):
        assert all(text.startswith("ReplicaMismatch: values[") for text in (shape, dtype, tree))
        kinds = ("float32[3, 2]", "float32[2, 3]") if rank else ("float32[2, 3]", "float32[3, 2]")
        assert (
            f"rank {rank} passed {kinds[0]}, and rank {0 if rank else 1} passed {kinds[1]}."
            in shape
        ), shape
        assert "int32[2, 3]" in dtype and "float32[2, 3]" in dtype
        assert "values['more']" in tree


def test_plans_of_other_specs(ranks: Results) -> None:
    """The first line says what differs, on which ranks; what they planned is below."""
    others = "rank 1 has" if len(ranks) == 2 else "ranks 1, 2 have"
    for said in every(ranks, "specs_that_differ"):
        first, *_ = said[0].splitlines()
        assert first == (
            "PlanMismatch: rank 0 has args[0]: float32[6, 6] as P(tp, None), "
            f"where {others} args[0]: float32[6, 6] as P(None, tp)."
        )
        for text in said:
            assert text.startswith("PlanMismatch: rank"), text
            assert "float32[6, 6] as P('tp'" in text and "float32[6, 6] as P(None" in text, text


@on_two
def test_a_rank_that_gathers_alone(ranks: Results) -> None:
    found = every(ranks, "one_rank_gathers_alone")
    assert found[0].startswith("ExchangeError: rank 1 did not report that it called full()")


def test_closed_over_replicas_that_differ(ranks: Results) -> None:
    for said in every(ranks, "closed_over_replicas_that_differ"):
        assert said.startswith("ReplicaMismatch: closure"), said


def test_calls_that_differ(ranks: Results) -> None:
    for said in every(ranks, "calls_that_differ"):
        assert said.startswith("OutOfStep: rank"), said
        assert "full()" in said and "passed to place" in said


def test_transformers_equal_one_device(ranks: Results) -> None:
    assert max(found["worst"] for found in every(ranks, "transformers")) <= 1e-12


@on_two
@pytest.mark.parametrize(
    "name", ["a_batch_shorter_than_the_mesh", "gradient_through_place_and_full"]
)
def test_gradients(ranks: Results, name: str) -> None:
    assert max(every(ranks, name)) <= 1e-12


def test_plans_that_differ(ranks: Results) -> None:
    for said in every(ranks, "plans_that_differ"):
        first, *_ = said.splitlines()
        assert first.startswith("PlanMismatch: rank 0 has args[0]: float32[3] as"), said
        assert "where rank 1 has args[0]: float32[4] as" in first, said


@on_two
def test_checkpoints_repeat_what_their_policy_says(ranks: Results) -> None:
    """One sum more in the block, unless its result is kept."""
    for found in every(ranks, "checkpointed_steps"):
        assert found["worst"] <= 1e-12
        once, *ran = found["ran"].values()
        assert ran == [once + 1, once], found["ran"]


@on_two
def test_policies_that_differ(ranks: Results) -> None:
    for said in every(ranks, "policies_that_differ"):
        assert said.startswith("PlanMismatch: rank"), said
        assert "\nThe programs differ, so their collectives would not match" in said
        assert "as (Layout" not in said and "native_layer_norm" in said.splitlines()[0], said


@on_two
def test_a_rank_that_retraces_alone(ranks: Results) -> None:
    found = every(ranks, "one_rank_retraces_alone")
    said = found[0]
    assert said.startswith("PlanMismatch: rank 1 did not report the plan within 3 s")
    assert said.splitlines()[1].startswith("Rank 0 planned <lambda>(args[0]: float32[4]) and waited")
    assert found[1:] == ["no error"] * (len(ranks) - 1)


@pytest.mark.parametrize(
    "name", ["storage_from_mesh_to_mesh", "storage_without_a_mesh", "storage_and_plain_dcp"]
)
def test_storage(ranks: Results, name: str) -> None:
    assert every(ranks, name) == [True] * len(ranks)


def test_everything_is_stored_once_and_ranks_share_the_work(ranks: Results) -> None:
    """Of 2 n replicated values each of n ranks writes two."""
    n = len(ranks)
    assert every(ranks, "storage_writes_everything_once") == [[1, 1, *[2] * n]] * n


def test_a_rank_that_cannot_store_its_part(ranks: Results) -> None:
    for said, left in every(ranks, "storage_one_rank_fails"):
        assert said == (
            "StorageError: rank 1: writing its shards of PATH failed with OSError: [Errno 28] No space "
            "left on device"
        )
        assert left == []
    for said in every(ranks, "storage_one_rank_cannot_read"):
        assert said.startswith("StorageError: rank 1: loading PATH failed with OSError")


@on_two
def test_a_rank_that_dies_while_it_stores(ranks: Results) -> None:
    found = every(ranks, "storage_one_rank_dies")
    assert found.pop(1)[0].startswith("KeyboardInterrupt")
    for said, left in found:
        assert said.startswith("StorageError: rank 1 did not report that it is done with writing")
        assert "within 4 s. It died" in said and "timeout" in said
        assert left == []


@on_two
def test_a_rank_that_does_not_store(ranks: Results) -> None:
    found = every(ranks, "storage_one_rank_does_not_call")
    assert found.pop(1)[0] == "no error"
    for said, left in found:
        assert said.startswith("StorageError: rank 1 did not report that it is done with planning to")
        assert "within 4 s. It died, does not make this call" in said
        assert left == []


def test_ranks_that_store_different_trees(ranks: Results) -> None:
    for scalars, tensors, keys, meshes, left in every(ranks, "storage_trees_that_differ"):
        assert "only rank 0 has tree['step']: 0, only rank 1 has tree['step']: 1" in scalars
        assert tensors.startswith("ReplicaMismatch: tree['x'] of save is replicated")
        assert "only rank 1 has tree['x1']: float32 [4] split P(tp) over Mesh(tp=" in keys
        assert meshes.startswith("StorageError: the tree has values on Mesh(tp=")
        assert "which have different processes; save and load them separately." in meshes
        assert left == "[]"
