"""RedriveForm: which dead letters go back, how many that are, and how far it is.

A condition, the fields that a page adds, a dry run and the redrive; below, what it came to, and while it runs
the progress and Stop. A page of one queue and that of all queues have it.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from nicegui.events import GenericEventArguments

from penstock.dashboard.layout import button, panel, tag
from penstock.dashboard.redriving import BAD_RECORD
from penstock.model.life import DEAD_REASONS

REASONS: Final[Mapping[str, str]] = {
    "rejected": "a consumer said: never again",
    "expired": "its time was over",
    "retries-exhausted": "its retry counter had run down",
    "too-many-deliveries": "it reached the queue's max-deliveries",
    "undeliverable": "it could not be delivered",
    BAD_RECORD: "a pipeline could not read a record, and reports it",
}
assert set(REASONS) == {reason.label for reason in DEAD_REASONS}

EXAMPLES: Final = (
    "value.region = 'north' and value.amount >= 100",
    "died > '-15m' and attempts < 3",
    "value like '%timed out%' or consumer is null",
)
COLUMNS: Final = (
    "Columns: reason, died, attempts, consumer, protocol, timestamp, expires, retries, offset, id, value, "
    "value_bytes; and value.field of a payload that is JSON."
)


class RedriveForm:
    """`fields` makes what stands beside the buttons; `submitted` gets all that was filled in."""

    def __init__(
        self,
        words: str,
        where: str | None,
        fields: Callable[[], None],
        submitted: Callable[[GenericEventArguments], Any],
    ) -> None:
        self.stopping = False
        with panel("Redrive"), tag("form", classes="ps-redrive") as form:
            tag("p", words, "ps-help")
            tag("label", "Condition", for_="ps-where")
            self._where = tag(
                "input",
                classes="ps-field",
                id="ps-where",
                name_="where",
                type="text",
                maxlength="10000",
                placeholder=EXAMPLES[0],
                autocomplete="off",
                spellcheck="false",
                aria_describedby="ps-where-wrong",
            )
            # As the address has it; what is typed from then on is the browser's.
            self._where.props["defaultValue"] = where or ""
            self._wrong = tag("p", "", "ps-wrong", id="ps-where-wrong", role="alert")
            with tag("details", classes="ps-terminal"):
                tag("summary", "What can stand in a condition")
                tag("p", COLUMNS, "ps-help")
                tag("pre", "\n".join(EXAMPLES), "ps-code", tabindex="0", role="group", aria_label="Examples")
            with tag("div", classes="ps-bar"):
                fields()
                with tag("div", classes="ps-actions ps-apart"):
                    self._go = [
                        tag("button", text, kind, type="submit", name_="do", value=what)
                        for text, kind, what in (
                            ("Dry run", "ps-button", "count"),
                            ("Redrive…", "ps-button ps-primary", "redrive"),
                        )
                    ]
            self._result = tag("p", "", "ps-result", role="status")
            with tag("div", classes="ps-bar") as self._running:
                self._progress = tag("progress", aria_label="Done so far", max="1", value="0")
                button("Stop", self._stop)
            self._running.set_visibility(False)
        form.on(
            "submit.prevent",
            submitted,
            js_handler="(event) => emit(Object.fromEntries(new FormData(event.target, event.submitter)))",
        )

    def _stop(self) -> None:
        self.stopping = True

    def say(self, text: str, wrong: str = "") -> None:
        """What it came to, or what is wrong with the condition."""
        self._result.set_text(text)
        self._wrong.set_text(wrong)
        self._where.props["aria-invalid"] = "true" if wrong else "false"
        self._where.update()

    def busy(self, busy: bool) -> None:
        """Whether nothing new can be asked for."""
        for element in self._go:
            element.props.set_bool("disabled", busy)

    def run(self, running: bool) -> None:
        """Show how far it is, from the beginning; or no more."""
        self._running.set_visibility(running)
        if running:
            self.far(0)

    def far(self, share: float) -> None:
        self._progress.props["value"] = f"{share:.3f}"
        self._progress.update()
