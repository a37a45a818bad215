"""Answering a batch of conversations, one open user turn after the other."""

from typing import Any

from dflash_mp.data.responses import Messages, Respond, Response, Skipped, row_seed


def open_turns(messages: Messages) -> list[int]:
    """Positions of the user turns that no assistant turn follows."""
    roles = [message["role"] for message in messages]
    return [
        position
        for position, role in enumerate(roles)
        if role == "user" and roles[position + 1 : position + 2] != ["assistant"]
    ]


def answer_conversations(
    rows: dict[int, dict[str, Any]], respond: Respond, seed: int
) -> list[dict[str, Any]]:
    """Answer every open user turn of a batch, one turn of all conversations at a time.

    ``rows`` is keyed by prompt number. Returns an entry of ``Parts`` for each.
    """
    talks = {index: Talk(row["messages"]) for index, row in rows.items()}
    turn = 0
    while active := {index: talk for index, talk in talks.items() if talk.advance()}:
        seeds = [row_seed(seed, index, turn) for index in active]
        replies = respond([talk.history for talk in active.values()], seeds)
        for talk, reply in zip(active.values(), replies, strict=True):
            talk.take(reply)
        turn += 1
    return [
        {
            "index": index,
            "row": _output_row(rows[index], talk),
            "skipped": f"{rows[index]['id']}: {talk.skipped}" if talk.skipped else None,
        }
        for index, talk in talks.items()
    ]


class Talk:
    """One conversation on its way from prompt to output row."""

    def __init__(self, messages: Messages) -> None:
        self.history: Messages = []
        """What was said so far."""

        self.replies: list[Response | None] = []
        """One entry per assistant turn of ``history``; None where the prompt brought it along."""

        self.skipped: str | None = None
        """Why the target did not answer; ends the conversation before that turn."""

        self._ahead = list(messages)

    def advance(self) -> bool:
        """Move on to the next open user turn; False when there is none left."""
        if self.skipped:
            return False
        opened = open_turns(self._ahead)
        stop = opened[0] + 1 if opened else len(self._ahead)
        self.history += self._ahead[:stop]
        self.replies += [None for m in self._ahead[:stop] if m["role"] == "assistant"]
        self._ahead = self._ahead[stop:]
        return bool(opened)

    def take(self, reply: Response | Skipped) -> None:
        """Append the reply to the turn that ``advance`` stopped at."""
        if isinstance(reply, Skipped):
            self.skipped = reply.reason
            while self.history and self.history[-1]["role"] != "assistant":
                self.history.pop()
        else:
            self.history.append({"role": "assistant", "content": reply.text})
            self.replies.append(reply)


def _output_row(prompt: dict[str, Any], talk: Talk) -> dict[str, Any] | None:
    """The row of one conversation; None when nothing in it was answered."""
    if not any(talk.replies):
        return None
    reasons = [reply.finish_reason if reply else None for reply in talk.replies]
    token_ids = [reply.token_ids if reply else None for reply in talk.replies]
    single = len(talk.replies) == 1
    row = {
        "id": prompt["id"],
        "messages": talk.history,
        "finish_reason": reasons[0] if single else reasons,
    }
    if any(ids is not None for ids in token_ids):
        row["response_token_ids"] = token_ids[0] if single else token_ids
    return {**row, "source": prompt["source"]}
