"""Where the weights are does not change the answers; weights that are nowhere are refused."""

import pytest
from accelerate import cpu_offload
from lm_eval.api.instance import Instance
from state import assert_same_state

from edit_hooks import EditingError
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.subject import EDIT_REQUESTS, Subject
from edit_hooks.contract.tiny_models import REQUESTS, build_model, save_tiny
from edit_hooks.lm.model import EditedHFLM


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def answers(model_path, tmp_path, **options):
    settings = {"num_steps": 3, "context_templates": ["{}"]}
    lm = EditedHFLM(
        pretrained=model_path,
        editor_args=settings,
        store="off",
        device="cpu",
        offload_folder=str(tmp_path / "offload"),
        **options,
    )
    before = snapshot(lm.model, lm.tokenizer)
    questions = []
    for number, request in enumerate(REQUESTS):
        doc = {"edit_requests": [request], "ask_unedited": True}
        prompt = request["prompt"].format(request["subject"])
        arguments = (prompt, " " + request["target_new"])
        questions.append(Instance("loglikelihood", doc, arguments, idx=number, metadata=("test", number, 1)))
    answers = lm.loglikelihood(questions)
    assert_same_state(before, snapshot(lm.model, lm.tokenizer))
    return [(answer.final.logprob, answer.final.unedited.logprob) for answer in answers]


@pytest.mark.parametrize(
    "placement",
    [{"device_map": {"": "cpu"}}, {"device_map": "auto"}, {"parallelize": True, "max_cpu_memory": "8GiB"}],
    ids=str,
)
@pytest.mark.parametrize("answer", ["auto", "patch"])
def test_placed_weights_answer_the_same(model_path, tmp_path, placement, answer):
    expected = answers(model_path, tmp_path, answer=answer)
    assert answers(model_path, tmp_path, answer=answer, **placement) == expected
    assert all(edited != unedited for edited, unedited in expected)


def test_offloaded_weights_are_refused(model_path, tmp_path):
    with pytest.raises(EditingError, match="were offloaded"):
        answers(model_path, tmp_path, parallelize=True, max_cpu_memory="90KiB")


@pytest.mark.parametrize("editor", ["grace", "rome"])
def test_a_model_that_accelerate_offloaded_is_refused(editor):
    subject = Subject(editor, "llama")
    with pytest.raises(EditingError, match="weights do not fit the devices and were offloaded"):
        subject.make().edit(cpu_offload(build_model("llama")), subject.tokenizer, EDIT_REQUESTS[:1])
