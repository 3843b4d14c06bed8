"""Faults that others reported of draft heads, and the test here that would catch each; those that cannot occur here, and why.

A key is project#number of the issue or change in which it was reported.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PARITY, FAULTS = "train/test_parity.py::test_training_and_serving_agree", "train/test_parity.py::test_a_planted_fault_is_named"
LAST_TAP = "dflash/test_draft_parity.py::test_taps_of_the_last_layer_are_the_same_in_both_forms"
EITHER_PLACE = "dflash/test_draft_config.py::test_block_size_and_theta_are_read_from_either_place"
LONG = "dflash/test_drafter_context.py::test_a_text_longer_than_max_position_embeddings_is_drafted_on"
OPTIONS = "train/test_distill_options.py::test_a_draft_with_everything_is_written_read_and_started_from"
PUBLISHED = "dflash/test_draft_parity.py::test_both_compute_what_is_published"
LOSSLESS = "runtime/test_lossless.py::test_the_text_is_the_one_without_a_draft"
NOT_HELPING = "runtime/test_server.py::test_a_draft_head_that_never_helps_is_named_once"

CAUGHT = {
    # training
    "SpecForge#470": "dflash/test_draft_parity.py::test_blocks_do_not_see_each_other",              # a block saw what comes after its anchor
    "SpecForge#471": FAULTS,                                                                           # labels shifted by one token
    "SpecForge#455": PARITY,                                                                           # a random head where it is tied to the embedding
    "SpecForge#473": "dflash/test_draft_parity.py::test_what_a_slot_is_trained_to_say_is_what_serving_compares_it_with",
    "SpecForge#463": "dflash/test_mask_anchors.py::test_every_valid_token_is_drawn_equally_often",   # evenly spaced blocks
    "SpecForge#533": PARITY,                                                                           # accurate in training, refused in serving
    "SpecForge#469": "train/test_responses.py::test_greedy_answers_are_the_target_s_greedy_text",    # trained on others' answers
    "SpecForge#742": "dflash/test_draft_config.py::test_every_convention_is_written_under_every_name",   # loads in one engine only
    "speculators#613": PUBLISHED,                                                                      # partial rotary ignored
    "speculators#738": PUBLISHED,
    "vLLM#46301": PUBLISHED,
    "speculators#705": LAST_TAP,
    "speculators#1066": "train/test_schedule.py::test_matrices_are_trained_by_the_optimizer_that_is_asked_for",   # a rate of their own for the rest
    "speculators#1071": "dflash/test_anchor_shares.py::test_documents_of_a_row_get_the_same_share_as_far_as_they_reach",
    "verl-SpeCo#91": "train/test_muon_ranks.py::test_parameters_that_fsdp1_flattened_are_refused",
    "verl-SpeCo#91 (zero)": "train/test_schedule.py::test_a_decay_of_zero_is_zero",                  # `x or default` swallows it
    "ModelOpt#1621": "train/test_distill_ranks.py::test_killed_ranks_continue_to_the_bits_of_an_uninterrupted_run",
    "ModelOpt#1621 (mask)": "train/test_distill_data.py::test_a_tokenizer_without_a_mask_token_needs_a_row_named",
    "ModelOpt#2221": "dflash/test_draft_config.py::test_two_names_for_one_number_must_agree",        # rope_theta a hundredfold off
    "ModelOpt#2149": OPTIONS,                                                                          # a warm start drops what a draft brings
    "ModelOpt#2149 (head)": "train/test_distill_options.py::test_a_warm_start_keeps_a_head_and_an_embedding_of_the_drafts_own",
    "ModelOpt#2201": "train/test_distill_ranks.py::test_a_rank_without_anchors_waits_for_nobody_and_adds_nothing",
    "ModelOpt#2410": "train/test_features.py::test_a_store_of_something_else_is_refused_and_untouched",   # a stale cache on resume
    "ModelOpt#1211": "train/test_walk.py::test_a_walk_of_a_model_has_the_rounds_of_its_loop",        # evaluation on fixed text is not the loop's
    "TorchSpec#87": FAULTS, "TorchSpec#89": LAST_TAP,
    "NeMo#2918": "train/test_distill_ranks.py::test_anchors_differ_between_data_parallel_ranks_and_agree_inside_a_tensor_parallel_group",
    "NeMo#3004": "dflash/test_draft_parity.py::test_a_packed_row_without_document_borders_breaks_the_bound",
    "hipfire#483": FAULTS,                                                                             # the mask token in the anchor's slot
    # serving
    "vLLM#40727": FAULTS,                                                                              # taps of the layer beside
    "vLLM#48113": "dflash/test_draft_checkpoint.py::test_a_draft_of_other_shapes_is_refused",
    "vLLM#48152": LAST_TAP, "vLLM#46788": LAST_TAP,
    "vLLM#40898": "dflash/test_draft_config.py::test_engines_read_one_window_and_one_causality",     # a window run as full attention
    "vLLM#46104": "dflash/test_draft_parity.py::test_a_window_off_by_one_breaks_the_bound",
    "vLLM#54691": NOT_HELPING,
    "vLLM#57941": LONG, "vLLM#57964": LONG, "vLLM#55279": LONG,
    "vLLM#45343": "train/test_walk.py::test_a_draft_that_is_right_in_training_and_never_accepted_raises_the_alarm", "vLLM#46435": NOT_HELPING,
    "vLLM#40149": LOSSLESS, "vLLM#35461": "dflash/test_generate.py::test_a_drafter_samples_with_the_noise_of_the_position",
    "vLLM#16899": "dflash/test_choose_tokens.py::test_picks_follow_the_target_distribution",
    "z-lab#74": "dflash/test_generate.py::test_greedy_and_sampled_are_different_texts",              # the temperature ignored
    "z-lab#150": EITHER_PLACE,
    "z-lab#3": "dflash/test_acceptance_metrics.py::test_every_round_weighs_the_same_whatever_text_it_is_of",
    "sglang#27924": OPTIONS, "sglang#27638": PUBLISHED,                                               # mask vector, sinks, value scale, window: all or nothing
    "llama.cpp#25792": "dflash/test_draft_parity.py::test_what_a_slot_is_trained_to_say_is_what_serving_compares_it_with",
    "llama.cpp#22105": "dflash/test_drafter_context.py::test_texts_of_one_draft_do_not_meet",
    "llama.cpp#22105 (target)": "runtime/test_reference.py::test_sequences_of_one_executor_do_not_meet",
    "buun-llama#32": "dflash/test_drafter_context.py::test_a_text_of_thousands_of_tokens_drafts_like_its_last_window",
    "lucebox#324": "dflash/test_generate.py::test_text_ends_at_the_end_of_sequence_wherever_it_is",
    "lucebox#437": "runtime/test_tree_lossless.py::test_the_text_is_the_one_without_a_draft",
    "lucebox#284": "dflash/test_drafter_context.py::test_the_base_of_the_rotation_is_the_drafts_own",
    "syv-ai#25": "runtime/test_server.py::test_parallel_answers_equal_sequential_ones",
}
PREFIX_CACHE = "no prefix cache: every request reads its prompt"
OPEN_QUESTION = "a question or a wish, no fault"
CANNOT_OCCUR = {
    "SpecForge#560": "how much data and how many steps: a recipe's matter, measured by every run on held-out prompts",
    "speculators#797": "a weaker kind of target: quality, measured by domain; no family here has linear attention",
    "vLLM#42971": PREFIX_CACHE, "vLLM#54163": PREFIX_CACHE, "vLLM#47930": PREFIX_CACHE, "z-lab#165": PREFIX_CACHE, "omlx#1441": PREFIX_CACHE,
    "vLLM#42692": "no fp8 key/value cache", "vLLM#41559": "no fp8 key/value cache",
    "vLLM#53122": "drafts are not quantized, and such are refused by dtype", "vLLM#53873": "drafts are not quantized, and such are refused by dtype",
    "vLLM#41262": "no Gemma target",
    "z-lab#66": "quality on texts longer than those trained on; windows and lengths are the recipe's",
    "z-lab#52": "quality by kind of text; figures are given by domain", "z-lab#7": "quality by language; figures are given by domain",
    "z-lab#6": "gain under load: the engine gives every request a round in turn, and batches none",
    "z-lab#19": OPEN_QUESTION, "z-lab#88": OPEN_QUESTION, "z-lab#90": OPEN_QUESTION, "z-lab#98": OPEN_QUESTION, "z-lab#126": OPEN_QUESTION,
    "sglang#37818": "no state-space target", "sglang#34285": "prefill and decoding run in one process",
    "llama.cpp#28587": "text only",
}


@cache
def functions_of(file: str) -> frozenset[str]:
    path = TESTS / file
    assert path.is_file(), file
    return frozenset(n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("case", CAUGHT)
def test_the_test_that_catches_it_is_there(case: str) -> None:
    file, _, name = CAUGHT[case].partition("::")
    assert name.startswith("test_") and name in functions_of(file), CAUGHT[case]


def test_every_case_is_listed_once_and_every_case_in_a_docstring_is_listed() -> None:
    listed = {c.split(" ")[0] for c in CAUGHT}
    assert not listed & CANNOT_OCCUR.keys() and all(CANNOT_OCCUR.values())
    assert all(re.fullmatch(r"[A-Za-z.-]+#\d+( \(\w+\))?", c) for c in (*CAUGHT, *CANNOT_OCCUR))
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (named := re.findall(r"[A-Za-z.-]+#\d+", ast.get_docstring(node) or "")):
                assert set(named) <= listed, f"{path.name}::{node.name}"
