"""What is asked about which answer, asking it several calls at a time, and the scores of the replies.

Answers to the questions of HELMET's references get HELMET's three requests, all others the question-only judge.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from hyco_export.core.artifact import content_digest
from hyco_export.errors import HycoError, counted
from hyco_export.evaluate.quality.contrasts import JUDGE, JUDGE_METRICS
from hyco_export.evaluate.quality.evaluation_folder import Answer, Place, Score
from hyco_export.evaluate.quality.judge import helmet
from hyco_export.evaluate.quality.judge.endpoint import JudgeClient, Message
from hyco_export.evaluate.quality.judge.helmet import Book, book_messages
from hyco_export.evaluate.quality.judge.log import Judgement, JudgementKey, JudgementLog
from hyco_export.evaluate.quality.judge.question import Turn, question_messages, read_score

BOOK_METRICS = (*helmet.ASKED, helmet.F1)
FIRST_TRIES = 3  # requests that may be rejected before the first reply: then it is no matter of one question
CHARACTERS_A_TOKEN = 4  # of English text, for the estimate of --dry-run
REPLY_TOKENS = {JUDGE: 10, helmet.FLUENCY: 10, helmet.RECALL: 500, helmet.PRECISION: 800}  # for the estimate: the
# last two think aloud, point by point and sentence by sentence

OnStep = Callable[[str, int, int], None]


class Books(NamedTuple):
    """HELMET's prompts by metric, and its references by question."""

    prompts: Mapping[str, str]
    references: Mapping[str, Book]


NO_BOOKS = Books({}, {})


class JudgeRequest(NamedTuple):
    """One call: about which answer, what is sent, how its reply is read."""

    key: JudgementKey
    messages: tuple[Message, ...]
    read: Callable[[str], float]


class Size(NamedTuple):
    """Calls and their tokens."""

    calls: int
    tokens_in: int
    tokens_out: int


def requests_for(answers: Iterable[Answer], model: str, books: Books, first_turns: bool) -> list[JudgeRequest]:
    """Every request about answers that have a text; of later turns only where those before have one too."""
    texts = {answer.place: answer for answer in answers if answer.failure is None}
    found: list[JudgeRequest] = []
    for answer in texts.values():
        if answer.question in books.references:
            found += _book_requests(answer, model, books)
        elif answer.turn == 1 or not first_turns:
            earlier = [texts.get(answer.place._replace(turn=turn)) for turn in range(1, answer.turn)]
            if None not in earlier:
                found.append(_question_request([*filter(None, earlier), answer], model))
    return found


def unanswered(requests: Iterable[JudgeRequest], log: JudgementLog, retry_missing: bool) -> list[JudgeRequest]:
    """The requests that are still to be sent; with `retry_missing` also those whose reply held no score."""
    todo = []
    for request in requests:
        row = log.find(request.key)
        if row is None or (retry_missing and row.value is None):
            todo.append(request)
    return todo


def metrics_of(books: Books) -> tuple[str, ...]:
    """The metrics whose scores a call with these references makes anew."""
    return JUDGE_METRICS if books.references else (JUDGE,)


def estimate(requests: Sequence[JudgeRequest]) -> Size:
    """Calls and about how many tokens they take; a model that thinks before it replies takes more."""
    characters = sum(len(message["content"]) for request in requests for message in request.messages)
    replies = sum(REPLY_TOKENS[request.key.metric] for request in requests)
    return Size(len(requests), characters // CHARACTERS_A_TOKEN, replies)


async def judge(
    requests: Sequence[JudgeRequest], client: JudgeClient, log: JudgementLog, concurrency: int, on_step: OnStep
) -> Size:
    """Send the requests and log every reply as it comes; what was sent, with the tokens that the endpoint counted.

    The first calls go one by one, until one gets a reply: they find out which fields the endpoint takes, and whether
    it takes anything.

    Raises:
        HycoError: what `JudgeClient.ask` raises, or the first FIRST_TRIES requests were all rejected. Replies that had
            come are logged.
    """
    rest = iter(requests)
    sent: list[Judgement] = []

    def keep(row: Judgement) -> None:
        log.add(row)
        sent.append(row)
        on_step("judgements", len(sent), len(requests))

    stopped: list[HycoError] = []

    async def work() -> None:
        for request in rest:  # one iterator for all: each takes the next
            try:
                row, _ = await _ask(request, client)
            except HycoError as error:
                stopped.append(error)
            else:
                keep(row)
            if stopped:  # calls in flight are waited for: their replies are paid for
                return

    for row in await _first_replies(rest, client, len(requests), log):
        keep(row)
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    if stopped:
        raise stopped[0]
    return Size(len(sent), sum(row.tokens_in for row in sent), sum(row.tokens_out for row in sent))


def scores(answers: Iterable[Answer], model: str, books: Books, first_turns: bool, log: JudgementLog) -> list[Score]:
    """A row for every request with a logged reply, F1 where its three parts were asked for, and rows without a
    value for every answer that has no text."""
    found: dict[Place, list[Score]] = {}
    answers = list(answers)
    for request in requests_for(answers, model, books, first_turns):
        row = log.find(request.key)
        if row is not None:
            key = Place(row.system, row.question, row.turn, row.generation)
            found.setdefault(key, []).append(Score(*key, row.metric, row.value, row.reason))
    for key, rows in found.items():
        parts = {row.metric: row.value for row in rows if row.metric in helmet.ASKED}
        if len(parts) == len(helmet.ASKED):
            rows.append(_f1_score(key, parts))
    without = [
        Score(*answer.place, metric, None, f"no answer: {answer.failure}")
        for answer in answers
        if answer.failure is not None and (answer.turn == 1 or not first_turns)
        for metric in (BOOK_METRICS if answer.question in books.references else (JUDGE,))
    ]
    return [score for rows in found.values() for score in rows] + without


async def _first_replies(
    rest: Iterator[JudgeRequest], client: JudgeClient, planned: int, log: JudgementLog
) -> list[Judgement]:
    rows: list[Judgement] = []
    for request in rest:
        row, rejected = await _ask(request, client)
        rows.append(row)
        if not rejected or log.has_reply_of(request.key.model):
            return rows
        if len(rows) == min(FIRST_TRIES, planned):
            what = f"the first {counted(len(rows), 'request')} to the judge got no reply; {row.reason}"
            raise HycoError(what, "correct its model and URL; nothing was logged")
    return rows


async def _ask(request: JudgeRequest, client: JudgeClient) -> tuple[Judgement, bool]:
    """The reply as a row of the log, and whether the request was rejected."""
    reply = await client.ask(request.messages)
    value, reason = None, reply.problem
    if not reason:
        try:
            value = request.read(reply.text)
        except ValueError as error:
            reason = str(error)
    sizes = (reply.tokens_in, reply.tokens_out, reply.attempts)
    return Judgement(*request.key, value, reason, reply.text, reply.finish, *sizes, reply.request), reply.rejected


def _question_request(turns: Sequence[Answer], model: str) -> JudgeRequest:
    messages = question_messages([Turn(turn.prompt, turn.text) for turn in turns])
    return JudgeRequest(_key(turns[-1], JUDGE, model, messages), messages, read_score)


def _book_requests(answer: Answer, model: str, books: Books) -> Iterator[JudgeRequest]:
    book = books.references[answer.question]
    for metric in helmet.ASKED:
        messages = book_messages(metric, books.prompts, book, answer.text)
        read = partial(_read_book, metric, book)
        yield JudgeRequest(_key(answer, metric, model, messages), messages, read)


def _read_book(metric: str, book: Book, reply: str) -> float:
    return helmet.read_value(metric, reply, book)


def _f1_score(key: Place, parts: Mapping[str, float | None]) -> Score:
    fluency, recall, precision = (parts[name] for name in helmet.ASKED)
    if fluency is None or recall is None or precision is None:
        missing = ", ".join(name for name in helmet.ASKED if parts[name] is None)
        return Score(*key, helmet.F1, None, f"without {missing}")
    return Score(*key, helmet.F1, helmet.f1(fluency, recall, precision))


def _key(answer: Answer, metric: str, model: str, messages: Sequence[Message]) -> JudgementKey:
    return JudgementKey(*answer.place, metric, model, content_digest([dict(message) for message in messages]))
