"""Write the prompts that the pocket's draft was distilled on: the user turns of the pocket's own training corpus, by domain.

    python recipes/pocket/draft_prompts.py --data_root DIR --out prompts

DIR holds the corpus files named in pretrain.yaml; held-out rows stay out, as they did in training. Answers are not written:
the target gives its own. stdlib.jsonl is this Python's standard library without the held-out modules, so that the draft sees
the version that the pocket was trained on wherever it is trained.
"""

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any

import corpus
import yaml

LONGEST = 1200   # characters; longer turns would leave no room for an answer in a row


def prompt_rows(recipe: dict[str, Any], domain: str, *, data_root: Path) -> list[dict[str, Any]]:
    """{prompt, tools} of the domain's training rows, each prompt once."""
    rows: dict[str, dict[str, Any]] = {}
    for source in recipe["corpus"][domain]["sources"]:
        if source["kind"] == "stdlib":
            continue
        modulus = source.get("heldout_modulus", recipe["holdout_modulus"])
        for name, document in corpus.documents(source, stdlib=Path(), data_root=data_root):
            messages, tools = (document["messages"], document["tools"]) if isinstance(document, dict) else (document, None)
            prompt = messages[0]["content"]
            if not corpus.is_held_out(name, modulus=modulus) and len(prompt) + len(json.dumps(tools)) <= LONGEST:
                rows[prompt] = {"prompt": prompt, "tools": tools}
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    recipe = yaml.safe_load(Path(__file__).with_name("pretrain.yaml").read_text())
    args.out.mkdir(parents=True, exist_ok=True)
    for domain in recipe["corpus"]:
        rows = prompt_rows(recipe, domain, data_root=args.data_root)
        (args.out / f"{domain}.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
        print(f"{domain}: {len(rows)} prompts")
    stdlib = next(s for s in recipe["corpus"]["code"]["sources"] if s["kind"] == "stdlib")
    modules = corpus.documents(stdlib, stdlib=Path(sysconfig.get_paths()["stdlib"]), data_root=None)
    texts = [text for name, text in modules if not corpus.is_held_out(name, modulus=recipe["holdout_modulus"])]
    (args.out / "stdlib.jsonl").write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts))
    print(f"stdlib: {len(texts)} modules")


if __name__ == "__main__":
    main()
