"""Runs in an interpreter that has llama-cpp-python (test_gguf.py): reads {"file", "text", "n"} as
JSON, prints the text's tokens, the n greedy tokens after them, and the logits before the first."""

import json
import sys

import llama_cpp
import numpy as np

job = json.load(sys.stdin)
llama = llama_cpp.Llama(
    job["file"], n_ctx=256, n_batch=256, n_threads=1, type_k=0, type_v=0, verbose=False
)


def logits():
    return np.ctypeslib.as_array(
        llama_cpp.llama_get_logits(llama.ctx), shape=(llama.n_vocab(),)
    ).copy()


tokens = llama.tokenize(job["text"].encode(), add_bos=True, special=False)
llama.eval(tokens)
first, greedy = logits(), []
for _ in range(job["n"]):
    greedy.append(int(logits().argmax()))
    llama.eval(greedy[-1:])
print(json.dumps({"tokens": tokens, "greedy": greedy, "logits": first.tolist()}))
