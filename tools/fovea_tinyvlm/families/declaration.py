"""The declaration from which a tiny checkpoint of a published family is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

TokenIds = Mapping[str, int]
"""The ids of a family's added tokens, keyed by their text."""


@dataclass(frozen=True, slots=True)
class ChatWords:
    """The texts around a family's turns, `{start}{role opener}{content}{end}`, and the text for each image."""

    user: str
    assistant: str
    end: str
    start: str = ""
    """The text before the first turn."""
    image: str = ""

    def template(self) -> str:
        """Returns the Jinja template of chats with text and images, without system prompts and tools."""
        return (
            f"{{{{- {self.start!r} }}}}"
            "{%- for message in messages %}"
            f"{{%- if message.role == 'assistant' %}}{{{{- {self.assistant!r} }}}}"
            f"{{%- else %}}{{{{- {self.user!r} }}}}{{%- endif %}}"
            "{%- if message.content is string %}{{- message.content }}"
            "{%- else %}{%- for part in message.content %}"
            f"{{%- if part.type == 'image' %}}{{{{- {self.image!r} }}}}"
            "{%- elif 'text' in part %}{{- part.text }}{%- endif %}"
            "{%- endfor %}{%- endif %}"
            f"{{{{- {self.end!r} }}}}"
            "{%- endfor %}"
            f"{{%- if add_generation_prompt %}}{{{{- {self.assistant!r} }}}}{{%- endif %}}"
        )


@dataclass(frozen=True, slots=True)
class Family:
    """A published family.

    Attributes:
        name: Its name here and in the documentation.
        published: The published checkpoint with the configuration that this family follows.
        source: The source of that configuration.
        architecture: The class in transformers.
        config: Makes the tiny configuration from the ids of the added tokens.
        processor: Makes the processor around a tokenizer; None for a text model.
        tokens: Special tokens, added in this order.
        plain_tokens: Added tokens that decoding keeps.
        token_names: Attributes of the tokenizer that its processor reads, such as `image_token`.
        chat: Words around the turns of a chat.
        begin, end, pad: The tokens that begin and end a text, and that pad a batch. `begin` is added to every encoded
            text if the published tokenizer does so.
        experts: The layout of a layer's experts in the published files: a matrix [outputs, inputs] for each expert and
            projection, or one tensor for all, [experts, outputs, inputs] or [experts, inputs, outputs].
    """

    name: str
    published: str
    source: str
    architecture: type[PreTrainedModel]
    config: Callable[[TokenIds], PretrainedConfig]
    tokens: tuple[str, ...]
    chat: ChatWords
    end: str
    pad: str
    begin: str | None = None
    processor: Callable[[PreTrainedTokenizerBase], ProcessorMixin] | None = None
    plain_tokens: tuple[str, ...] = ()
    token_names: Mapping[str, str] = field(default_factory=dict)
    experts: Literal["one by one", "together", "together, transposed"] = "one by one"
