"""The keep set: what is always in it, what fills it, and what is refused."""

import json
import re
import shutil

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from hyco_export.core.files import resource_path
from hyco_export.core.keepset import KEEPSET_FILE, read_keepset
from hyco_export.core.recipe_loading import load_recipe
from hyco_export.dev.tiny.configs import train_tokenizer
from hyco_export.errors import CheckpointError, RecipeError
from hyco_export.models.text.token_counts import is_held_out
from hyco_export.models.text.tokenizer import TokenizerFile
from hyco_export.models.text.vocabulary import byte_ids, special_ids, token_texts
from hyco_export.stages import build_keepset
from hyco_export.stages.declarations import Silent
from hyco_export.stages.table import KeepSetConfig, keepset_config

HIDDEN = 8
ANSWERS = ["Brackets nest.", "Brackets open and brackets close.", "A list keeps order.", "한국어 안녕하세요 한국어"]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifier")
    tokenizer = train_tokenizer(ANSWERS * 20)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma4_text"}))
    table = torch.randn(len(tokenizer), HIDDEN, generator=torch.Generator().manual_seed(1))
    save_file({"model.embed_tokens.weight": table}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def tokenizer(verifier):
    from hyco_export.models.verifier import load_tokenizer

    return load_tokenizer(verifier)


def write_conversations(path, texts_by_id):
    lines = [
        {"id": key, "messages": [{"role": "user", "content": f"zzz? {key}"}, {"role": "assistant", "content": text}]}
        for key, text in texts_by_id.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def inputs(tmp_path, verifier, tokenizer):
    (tmp_path / "capture").mkdir()
    answer_ids = tokenizer.encode("Brackets nest.")
    answer = {"id": "v", "split": "validation", "messages": [], "prompt_ids": [2], "answer_ids": answer_ids, "text": ""}
    (tmp_path / "capture" / "answers.jsonl").write_text(json.dumps(answer) + "\n")
    return {
        "verifier": verifier,
        "capture": tmp_path / "capture",
        "conversations": write_conversations(
            tmp_path / "conversations.jsonl",
            {"c1": ANSWERS[0], "c2": ANSWERS[1], "used": ANSWERS[2] * 50, "seen": ANSWERS[2] * 50},
        ),
        "calibration": write_conversations(tmp_path / "calibration.jsonl", {"used": "x"}),
        "validation": write_conversations(tmp_path / "validation.jsonl", {"seen": "x"}),
    }


def fixed_size(tokenizer):
    korean = sum(
        any("가" <= letter <= "힣" for letter in text)
        for text in token_texts(tokenizer.backend_tokenizer, len(tokenizer))
    )
    assert korean > 0
    return 7 + 256 + korean


def build(inputs, out_dir, size, scripts=("Hangul",), held_out_share=0.0):
    out_dir.mkdir()
    return build_keepset.build(KeepSetConfig(size, scripts, held_out_share, "float32"), inputs, out_dir, Silent())


def test_specials_bytes_and_scripts_are_always_kept(tmp_path, inputs, tokenizer):
    size = fixed_size(tokenizer)
    metrics = build(inputs, tmp_path / "out", size)
    keepset = read_keepset(tmp_path / "out")
    kept = {tokenizer.convert_ids_to_tokens(int(i)) for i in keepset.ids}
    assert {"<pad>", "<bos>", "<|turn>", "<0x00>", "<0xFF>"} <= kept
    assert all(token in kept for token in tokenizer.tokenize("한국어"))
    assert metrics["parts"] == {"specials": 7, "bytes": 256, "scripts": size - 263, "frequent": 0, "of_them_unseen": 0}
    assert metrics["digest"] == keepset.digest


def test_the_most_frequent_tokens_of_assistant_turns_fill_the_rest(tmp_path, inputs, tokenizer):
    build(inputs, tmp_path / "out", fixed_size(tokenizer) + 1)
    kept = set(read_keepset(tmp_path / "out").ids.tolist())
    pieces = tokenizer.encode(ANSWERS[0], add_special_tokens=False) + tokenizer.encode(
        ANSWERS[1], add_special_tokens=False
    )
    counts = np.bincount(pieces)
    assert kept - set(range(263)) >= {int(np.argmax(counts))}  # user turns and excluded conversations count nothing
    assert not kept & set(tokenizer.encode("zzz?", add_special_tokens=False)) - set(range(263))


def test_calibration_and_validation_conversations_are_not_counted(tmp_path, inputs, tokenizer):
    metrics = build(inputs, tmp_path / "out", fixed_size(tokenizer) + 4)
    assert metrics["conversations"] == {"counted": 2, "held_out": 0, "excluded": 2}
    only_excluded = set(tokenizer.encode(ANSWERS[2], add_special_tokens=False)) - {
        piece for text in ANSWERS[:2] for piece in tokenizer.encode(text, add_special_tokens=False)
    }
    assert only_excluded and not only_excluded & set(read_keepset(tmp_path / "out").ids.tolist())


def test_coverage_is_measured_on_held_out_text_and_on_the_answers(tmp_path, inputs, tokenizer):
    texts = {f"h{i}": ANSWERS[i % 2] for i in range(40)}
    write_conversations(inputs["conversations"], texts)
    metrics = build(inputs, tmp_path / "out", len(tokenizer), held_out_share=0.3)
    held_out = [text for key, text in texts.items() if is_held_out(key, 0.3)]
    assert 0 < len(held_out) < 40
    assert metrics["conversations"]["held_out"] == len(held_out)
    assert metrics["held_out"]["tokens"] == sum(len(tokenizer.encode(t, add_special_tokens=False)) for t in held_out)
    assert metrics["held_out"]["kept_share"] == 1.0
    assert metrics["answers"]["validation"] == {
        "tokens": len(tokenizer.encode("Brackets nest.")),
        "kept_share": 1.0,
        "outside_share": 0.0,
    }
    assert json.loads((tmp_path / "out" / "coverage.json").read_text()) == metrics


def test_answers_outside_the_keep_set_are_counted(tmp_path, inputs, tokenizer):
    metrics = build(inputs, tmp_path / "out", fixed_size(tokenizer))
    kept = set(read_keepset(tmp_path / "out").ids.tolist())
    ids = tokenizer.encode("Brackets nest.")
    expected = sum(i not in kept for i in ids) / len(ids)
    assert expected > 0
    assert metrics["answers"]["validation"]["outside_share"] == pytest.approx(expected)


def test_two_builds_give_the_same_bytes(tmp_path, inputs, tokenizer):
    for name in ("one", "two"):
        build(inputs, tmp_path / name, fixed_size(tokenizer) + 9)
    assert (tmp_path / "one" / KEEPSET_FILE).read_bytes() == (tmp_path / "two" / KEEPSET_FILE).read_bytes()


def test_the_table_has_one_row_and_scale_per_kept_token(tmp_path, inputs, tokenizer):
    size = fixed_size(tokenizer) + 2
    build(inputs, tmp_path / "out", size)
    stored = load_file(tmp_path / "out" / KEEPSET_FILE)
    assert {name: (str(t.dtype), t.shape) for name, t in stored.items()} == {
        "ids": ("int32", (size,)),
        "table": ("int8", (size, HIDDEN)),
        "table_scale": ("float32", (size,)),
    }


def test_a_coverage_takes_the_smallest_size_that_reaches_it(tmp_path, inputs, tokenizer):
    texts = {f"h{i}": " ".join(ANSWERS[k] for k in range(3) if (i >> k) % 2 or k == 0) for i in range(60)}
    write_conversations(inputs["conversations"], texts)
    (tmp_path / "out").mkdir()
    config = KeepSetConfig(None, ("Hangul",), 0.3, "float32", 0.9)
    build_keepset.check(config, inputs)
    metrics = build_keepset.build(config, inputs, tmp_path / "out", Silent())
    assert metrics["held_out"]["kept_share"] >= 0.9
    assert metrics["size"] == metrics["sizes_for_held_out_share"]["0.9"]
    smaller = build(inputs, tmp_path / "smaller", metrics["size"] - 1, held_out_share=0.3)
    assert smaller["held_out"]["kept_share"] < 0.9


def test_a_coverage_that_no_known_token_reaches_is_refused(tmp_path, inputs, tokenizer):
    texts = {f"h{i}": ANSWERS[0] for i in range(40)}
    rare = next(name for name in (f"rare{i}" for i in range(99)) if is_held_out(name, 0.3))
    write_conversations(inputs["conversations"], {**texts, rare: ANSWERS[2]})
    (tmp_path / "out").mkdir()
    with pytest.raises(
        RecipeError, match=r"\$.keepset.coverage is 1.0, but all [\d,]+ tokens .* cover 0\.\d+"
    ) as caught:
        build_keepset.build(KeepSetConfig(None, (), 0.3, "float32", 1.0), inputs, tmp_path / "out", Silent())
    assert "at most 0." in caught.value.hint


def test_a_coverage_without_held_out_text_is_refused(tmp_path, inputs):
    (tmp_path / "out").mkdir()
    with pytest.raises(RecipeError, match=r"the 0 held-out conversations hold no assistant's text"):
        build_keepset.build(KeepSetConfig(None, (), 1e-9, "float32", 0.9), inputs, tmp_path / "out", Silent())


def test_the_curve_and_its_picture_hold_the_chosen_size(tmp_path, inputs, tokenizer):
    size = fixed_size(tokenizer) + 5
    write_conversations(inputs["conversations"], {f"h{i}": ANSWERS[i % 2] for i in range(40)})
    metrics = build(inputs, tmp_path / "out", size, held_out_share=0.5)
    rows = json.loads((tmp_path / "out" / "curve.json").read_text())
    (chosen,) = [row for row in rows if row["size"] == size]
    assert chosen["held_out_share"] == metrics["held_out"]["kept_share"]
    picture = (tmp_path / "out" / "curve.svg").read_text()
    assert picture.startswith("<svg") and f"{size:,} tokens" in picture and "--ink: " in picture


class Notes(Silent):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def noted_build(inputs, out_dir, size, held_out_share):
    out_dir.mkdir()
    progress = Notes()
    config = KeepSetConfig(size, (), held_out_share, "float32")
    return build_keepset.build(config, inputs, out_dir, progress), progress.notes


@pytest.mark.parametrize(
    ("texts", "share", "part"),
    [
        (
            {"c1": " ", "c2": ""},
            0.0,
            "2 conversations were counted (0 held out, 0 that calibrate or validate), and none",
        ),
        ({"c1": "\x01\x02"}, 0.0, "none of their 2 tokens is outside the 263 that are always kept"),
        ({"c1": ANSWERS[0]}, 0.999999, "0 conversations were counted (1 held out"),
        ({"used": ANSWERS[0], "seen": ANSWERS[1]}, 0.0, "(0 held out, 2 that calibrate or validate)"),
    ],
)
def test_a_keep_set_that_no_text_decides_is_refused(tmp_path, inputs, texts, share, part):
    write_conversations(inputs["conversations"], texts)
    with pytest.raises(RecipeError, match=re.escape(part)) as caught:
        noted_build(inputs, tmp_path / "out", 270, share)
    assert "nothing says which 7 to take" in caught.value.message
    assert not (tmp_path / "out" / "keepset.safetensors").exists()


def test_a_size_beyond_the_data_is_said_with_the_size_that_they_need(tmp_path, inputs, tokenizer):
    used = {i for text in ANSWERS[:2] for i in tokenizer.encode(text, add_special_tokens=False)}
    needed = 263 + len({i for i in used if i >= 263})
    metrics, notes = noted_build(inputs, tmp_path / "out", needed + 3, 0.0)
    assert metrics["parts"]["of_them_unseen"] == 3
    assert len(notes) == 1
    assert f"3 kept tokens never occur in the 2 counted conversations: these need no more than {needed:,}" in notes[0]
    assert noted_build(inputs, tmp_path / "exact", needed, 0.0)[1] == []


def test_a_share_of_nothing_is_no_number(tmp_path, inputs):
    metrics, notes = noted_build(inputs, tmp_path / "out", 264, 1e-9)
    assert metrics["held_out"] == {"tokens": 0, "kept_share": None, "outside_share": None}
    assert ["0 held-out conversations hold no text" in note for note in notes] == [True]


def test_the_metrics_say_which_data_files_were_read(tmp_path, inputs):
    folder = tmp_path / "data"
    (folder / ".ipynb_checkpoints").mkdir(parents=True)
    for name in ("a.jsonl", "b.txt", ".ipynb_checkpoints/a.jsonl"):
        (folder / name).write_bytes(inputs["conversations"].read_bytes())
    metrics, _ = noted_build({**inputs, "conversations": folder}, tmp_path / "out", 264, 0.0)
    assert metrics["data_files"]["conversations"] == {"read": 1, "hidden": 1, "of another kind": 1}
    assert metrics["data_files"]["validation"] == {"read": 1}
    assert metrics["conversations"]["counted"] == 2


def test_the_ids_of_every_conversation_are_recorded(tmp_path, inputs, tokenizer):
    build(inputs, tmp_path / "out", fixed_size(tokenizer))
    ids = json.loads((tmp_path / "out" / "conversations.json").read_text())
    assert ids == {"counted": ["c1", "c2"], "held_out": [], "excluded": ["used", "seen"]}


def test_the_same_conversation_under_another_id_is_not_counted(tmp_path, inputs, tokenizer):
    first_turn = {"id": "elsewhere", "messages": [{"role": "user", "content": " ZZZ?  c1 "}]}
    inputs["calibration"].write_text(json.dumps(first_turn) + "\n")
    build(inputs, tmp_path / "out", fixed_size(tokenizer))
    ids = json.loads((tmp_path / "out" / "conversations.json").read_text())
    assert ids["counted"] == ["c2", "used"]


def test_a_size_below_the_fixed_part_is_refused_with_the_numbers(tmp_path, inputs, tokenizer):
    smallest = fixed_size(tokenizer)
    with pytest.raises(RecipeError) as caught:
        build_keepset.check(KeepSetConfig(smallest - 1, ("Hangul",), 0.1, "float32"), inputs)
    assert caught.value.message == (
        f"$.keepset.size is {smallest - 1}, smaller than its fixed part of {smallest} tokens "
        f"(7 specials, 256 bytes, {smallest - 263} scripts)"
    )
    assert f"at least {smallest}" in caught.value.hint
    build_keepset.check(KeepSetConfig(smallest, ("Hangul",), 0.1, "float32"), inputs)


def test_a_size_above_the_vocabulary_is_refused(tmp_path, inputs, tokenizer):
    with pytest.raises(RecipeError, match=r"\$.keepset.size is 5,000, larger than the verifier's vocabulary"):
        build(inputs, tmp_path / "out", 5000)


def test_an_unknown_script_is_refused_before_counting(tmp_path, inputs):
    inputs["conversations"] = tmp_path / "never read"
    with pytest.raises(RecipeError, match="Hangol"):
        build(inputs, tmp_path / "out", 400, scripts=("Hangol",))


def test_byte_tokens_come_from_the_tokenizer(tokenizer):
    assert [tokenizer.convert_ids_to_tokens(int(i)) for i in byte_ids(tokenizer.backend_tokenizer)[[0, 10, 255]]] == [
        "<0x00>",
        "<0x0A>",
        "<0xFF>",
    ]


def test_a_tokenizer_without_byte_tokens_is_refused():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")))
    with pytest.raises(CheckpointError, match="no byte token <0x00>"):
        byte_ids(plain.backend_tokenizer)


def test_specials_beyond_the_models_rows_are_left_out(tokenizer):
    assert special_ids(TokenizerFile(tokenizer.backend_tokenizer), 5).tolist() == [0, 1, 2, 3, 4]


def test_the_stage_config_holds_what_changes_the_bytes():
    assert set(msgspec.structs.asdict(KeepSetConfig(300, (), 0.1, "bfloat16"))) == {
        "size",
        "scripts",
        "held_out_share",
        "verifier_dtype",
        "coverage",
        "answers_weight",
    }


def answer(split, ids):
    return {"id": "c", "split": split, "messages": [], "prompt_ids": [2], "answer_ids": ids, "text": ""}


def built_with_answers(inputs, out_dir, size, weight, answers):
    lines = "".join(json.dumps(each) + "\n" for each in answers)
    (inputs["capture"] / "answers.jsonl").write_text(lines)
    out_dir.mkdir()
    config = KeepSetConfig(size, (), 0.0, "float32", answers_weight=weight)
    metrics = build_keepset.build(config, inputs, out_dir, Silent())
    return metrics, set(read_keepset(out_dir).ids.tolist())


def test_answers_to_calibration_prompts_count_with_their_weight(tmp_path, inputs, tokenizer):
    said = tokenizer.encode(ANSWERS[0], add_special_tokens=False) + tokenizer.encode(
        ANSWERS[1], add_special_tokens=False
    )
    times, smallest = max((said.count(token), -token) for token in said if token >= 263)  # equal counts: the smaller id
    often = -smallest
    greedy, sampled, validated = sorted(set(range(263, len(tokenizer))) - set(said))[:3]
    answers = [
        *(answer("calibration", [greedy]) for _ in range(times)),
        answer("sampled", [sampled] * times),
        answer("validation", [validated] * 9 * times),
    ]
    _, plain = built_with_answers(inputs, tmp_path / "plain", 264, msgspec.UNSET, answers)
    assert plain - set(range(263)) == {often}
    metrics, kept = built_with_answers(inputs, tmp_path / "weighted", 266, 1.5, answers)
    assert kept - set(range(263)) == {often, greedy, sampled}
    assert metrics["counted_answers"] == {"tokens": 2 * times, "weight": 1.5}
    assert metrics["parts"]["of_them_unseen"] == 0
    _, small = built_with_answers(inputs, tmp_path / "small", 264, 0.5, answers)
    assert small - set(range(263)) == {often}


def test_the_embedded_recipe_counts_answers_and_the_papers_does_not():
    tiny, paper = (
        keepset_config(load_recipe(resource_path(f"recipes/{name}.yaml"))) for name in ("tiny", "gemma4-26b-a4b-sm8850")
    )
    assert tiny.answers_weight == 1.0
    assert "answers_weight" not in msgspec.to_builtins(paper)  # its artifacts keep their keys


def test_tokens_that_the_verifier_suppresses_are_never_kept(tmp_path, inputs, tokenizer):
    """Neither specials nor bytes nor what the conversations say most often; the largest size is the smaller for it."""
    backend = tokenizer.backend_tokenizer
    special, byte = int(special_ids(TokenizerFile(backend), len(tokenizer))[-1]), int(byte_ids(backend)[65])
    often = tokenizer.encode("Brackets", add_special_tokens=False)[0]
    folder = shutil.copytree(inputs["verifier"], tmp_path / "suppressing")
    suppressed = [special, byte, often]
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": suppressed}))
    changed = {**inputs, "verifier": folder}
    largest = len(tokenizer) - len(suppressed)
    build(changed, tmp_path / "all", largest)
    kept = read_keepset(tmp_path / "all").ids
    assert np.array_equal(kept, np.setdiff1d(np.arange(len(tokenizer)), suppressed))
    with pytest.raises(RecipeError, match=rf"of which {largest:,} are ever generated"):
        build(changed, tmp_path / "more", largest + 1)
