"""Write the JSON Schema of documents, docs/data/document.schema.json."""

import json
from pathlib import Path

from mmkit.document import build_json_schema

PATH = Path(__file__).parents[1] / "docs" / "data" / "document.schema.json"

if __name__ == "__main__":
    text = json.dumps(build_json_schema(), indent=1, ensure_ascii=False)
    PATH.write_text(text + "\n", encoding="utf-8")
