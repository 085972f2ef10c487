"""The training and validation data: a dataclass for each kind of rows, with the keys that this kind reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Tag

from ag.config.keys import classes_by_tag, refuse
from ag.config.sections import key

OWN = "own"  # stands for a kind of a plugin


@dataclass
class DataConfig:
    """The keys of all kinds. ``DataConfig(kind=..., packing=..., ...)`` makes the class that these two choose."""

    kind: str = key(
        "facts",
        "sft: prompt and response; text: plain documents; facts (of the quickstart) and worked problems are "
        "generated; or a kind of a plugin",
        words="sft | text | facts | worked | a kind of your own",
    )
    name: str = key(
        "facts",
        "a task of the sft table (piqa, boolq, ...); a folder or hub id (sft, text); worked or one of its kinds, such "
        "as addition",
    )
    max_length: int = key(1024, "longest row in tokens; a longer prompt is counted and loses its left part", ge=2)
    train_samples: int | None = key(None, "use the first N training rows only", ge=1)
    val_samples: int | None = key(None, "use the first N validation rows only", ge=1)
    batch_size: int = key(4, "rows per device and step", ge=1)
    val_batch_size: int = key(8, "rows per device in validation (multiple choice: questions)", ge=1)
    num_workers: int = key(0, "data loading processes per device", ge=0)

    def __new__(cls, *args: Any, **values: Any) -> Any:
        """Make the class that ``kind`` and ``packing`` choose."""
        return object.__new__(DATA[choose_data(values)] if cls is DataConfig else cls)


@dataclass
class StoredConfig(DataConfig):
    """Rows of a folder or of the hub."""

    subset: str | None = key(None, "configuration name of a hub dataset (text, own sft)")
    revision: str | None = key(None, "git revision of a hub dataset (text, own sft)")
    root: str | None = key(
        None,
        "local folder instead of the hub: SPLIT.jsonl, .json, .parquet, .csv, .txt, shards SPLIT-*.jsonl, or the "
        "output of save_to_disk; a subfolder called data.name goes first",
        holds="folder",
    )
    text_field: str = key("text", "field that holds a document (text)")

    def __post_init__(self) -> None:
        if self.name == DataConfig.name and self.root is None:
            reason = "give data.root=FOLDER, data.name=ORG/NAME of the hub, or data.kind=facts"
            refuse(self, "name kind", reason, "data.")


@dataclass
class PromptConfig(DataConfig):
    """Prompts of a length between two bounds."""

    prompt_min: int = key(192, "shortest prompt in tokens (text, split; facts: roughly)", ge=1)
    prompt_max: int = key(512, "longest prompt in tokens (text, split; facts: roughly)", ge=1)

    def check_prompts(self) -> None:
        """Refuse bounds without a length between them."""
        if self.prompt_min > self.prompt_max:
            refuse(self, "prompt_min prompt_max", "no length lies between; swap them", "data.")


@dataclass
class QuestionConfig(DataConfig):
    """Rows with a question."""

    question: Literal["before", "after"] = key(
        "before",
        "before: the prompt contains the question; after: the prompt, on which gates act, is the text before the "
        "question (facts, boolq, rte)",
    )


@dataclass
class CutConfig(PromptConfig):
    """Documents that are cut into a prompt and its continuation."""

    continuation: int = key(64, "tokens after the prompt that carry the loss (text, split)", ge=1)


@dataclass
class SftKeys:
    """The keys of supervised rows of your own."""

    prompt_field: str = key("prompt", "field that holds a prompt (own sft)")
    response_field: str = key(
        "response", "field that holds its response, appended as it is; completion is read as well (own sft)"
    )
    messages_field: str = key(
        "messages",
        "field that holds a chat instead, as objects with role and content; conversations is read as well (own sft)",
    )
    eos: bool | None = key(
        None,
        "whether a response ends with EOS (sft); null means yes in your own rows of prompt and response, no elsewhere",
    )


@dataclass
class SftConfig(SftKeys, StoredConfig, CutConfig, QuestionConfig):
    """Prompts and responses, chats, and tasks of the table. Rows of your own may also be documents, which are cut."""

    kind: str = "sft"


@dataclass
class TextKeys:
    """The keys of plain documents."""

    packing: Literal["packed", "split", "repeated", "responses"] = key(
        "split",
        "text; packed: rows of max_length tokens; split: prompt and continuation; repeated: a passage and its copy; "
        "responses: a context and a response of each kind of data.responses",
    )
    cache: str | None = key(
        None, "folder of tokenised rows, shared by later runs and all processes (text)", holds="output"
    )


@dataclass
class TextConfig(TextKeys, StoredConfig):
    """Plain documents; ``packing`` says how rows are cut from them."""

    kind: str = "text"


@dataclass
class PackedKeys:
    """The keys of packed rows."""

    cross_documents: bool = key(
        True, "text, packed: tokens attend to earlier documents of their row; false: only to their own document"
    )


@dataclass
class RepeatedKeys:
    """The keys of repeated passages."""

    copy_max: int = key(
        0,
        "tokens of the random chunk of a passage that is repeated; the last chunk of a passage may be shorter; 0 means "
        "the whole passage (text, repeated)",
        ge=0,
    )


@dataclass
class ResponsesKeys:
    """The keys of contexts with responses."""

    contexts: list[int] = key([512, 1024, 2048], "tokens of a context, sampled from this list (text, responses)")
    responses: list[str] = key(
        ["again", "next", "question"],
        "the responses to a context, a row for each. again: a chunk of it once more; next: the text after it; "
        "question: the answer to a question about one of eight facts that are put into it, or an answer that follows "
        "a rule of a system prompt before it (text, responses)",
    )


@dataclass
class PackedConfig(PackedKeys, TextConfig):
    """Rows full of documents."""

    packing: Literal["packed"] = "packed"


@dataclass
class SplitConfig(TextConfig, CutConfig):
    """A prompt and its continuation."""

    packing: Literal["split"] = "split"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_prompts()
        if self.prompt_max + self.continuation > self.max_length:
            reason = "rows would be too long; raise data.max_length, or lower data.prompt_max"
            refuse(self, "prompt_max continuation max_length", reason, "data.")


@dataclass
class RepeatedConfig(RepeatedKeys, TextConfig):
    """A passage and its copy."""

    packing: Literal["repeated"] = "repeated"


@dataclass
class ResponsesConfig(ResponsesKeys, TextConfig):
    """A context with several responses, a row for each."""

    packing: Literal["responses"] = "responses"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.responses:
            refuse(self, "responses", "a context has no row; name again, next or question", "data.")


@dataclass
class FactsConfig(PromptConfig, QuestionConfig):
    """The generated passages of the quickstart."""

    DEFAULT_TRAIN_ROWS: ClassVar[int] = 2000  # rows without train_samples
    kind: str = "facts"

    def __post_init__(self) -> None:
        if self.name != DataConfig.name:
            reason = "use data.kind=sft for a task, text for documents, worked for worked problems"
            refuse(self, "name kind", reason, "data.")
        self.check_prompts()
        if self.prompt_max > self.max_length:
            reason = "rows would be too long; raise data.max_length, or lower data.prompt_max"
            refuse(self, "prompt_max max_length", reason, "data.")


@dataclass
class WorkedKeys:
    """The keys of worked problems."""

    solution_min: int = key(200, "shortest solution in tokens (worked; roughly)", ge=20)
    solution_max: int = key(400, "longest solution in tokens (worked)", ge=60)


@dataclass
class WorkedConfig(WorkedKeys, DataConfig):
    """Generated problems with worked solutions."""

    DEFAULT_TRAIN_ROWS: ClassVar[int] = 4000  # rows without train_samples
    kind: str = "worked"

    def __post_init__(self) -> None:
        if self.solution_min > self.solution_max:
            refuse(self, "solution_min solution_max", "no length lies between; swap them", "data.")
        if self.solution_max >= self.max_length:
            reason = "there is no room for a prompt; raise data.max_length, or lower data.solution_max"
            refuse(self, "solution_max max_length", reason, "data.")


@dataclass
class OwnDataConfig(
    SftKeys, TextKeys, PackedKeys, RepeatedKeys, ResponsesKeys, WorkedKeys, StoredConfig, CutConfig, QuestionConfig
):
    """A kind of a plugin, which may read every key and checks their values."""

    kind: str = OWN

    def __post_init__(self) -> None:
        """Check nothing."""


def choose_data(values: Mapping[str, Any]) -> str:
    """Return the tag in :data:`Data` of the values of a section."""
    kind = values.get("kind", "facts")
    if kind == "text":
        return f"data.kind=text data.packing={values.get('packing', 'split')}"
    return f"data.kind={kind if kind in ('sft', 'facts', 'worked') else OWN}"


Data = Annotated[
    Annotated[SftConfig, Tag("data.kind=sft")]
    | Annotated[PackedConfig, Tag("data.kind=text data.packing=packed")]
    | Annotated[SplitConfig, Tag("data.kind=text data.packing=split")]
    | Annotated[RepeatedConfig, Tag("data.kind=text data.packing=repeated")]
    | Annotated[ResponsesConfig, Tag("data.kind=text data.packing=responses")]
    | Annotated[FactsConfig, Tag("data.kind=facts")]
    | Annotated[WorkedConfig, Tag("data.kind=worked")]
    | Annotated[OwnDataConfig, Tag(f"data.kind={OWN}")],
    Discriminator(choose_data),
]
DATA = classes_by_tag(Data)
