"""TRL's own client of a vLLM server asks ours: `python trl_client_run.py URL TOKEN`; prints what it got as JSON."""

from __future__ import annotations

import json
import sys

from trl.generation import vllm_client


def main(url: str, token: str) -> dict:
    """What each of its methods gave."""
    # it asks for vLLM's package, of which it uses nothing but the NCCL engine
    vllm_client.is_vllm_available = lambda *_, **__: True

    class Client(vllm_client.VLLMClient):
        """With a token, of which TRL knows nothing."""

        def check_server(self, *given, **named):
            self.session.headers["Authorization"] = f"Bearer {token}"
            super().check_server(*given, **named)

    client = Client(base_url=url)
    seed = {"generation_kwargs": {"seed": 5}}
    generated = client.generate(["a", "b"], n=2, max_tokens=10, temperature=0.9, **seed)
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    chatted = client.chat(chats, n=2, max_tokens=10, **seed)
    client.reset_prefix_cache()
    with client.weight_update():
        pass
    update = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}
    refused = client.session.post(f"{url}/update_weights", json={"update_info": update})
    client.close_communicator()
    return {
        "model": client.model,
        "world_size": client.get_world_size(),
        "info": client.get_server_info(),
        "generated": generated,
        "chatted": chatted,
        "refused": [refused.status_code, refused.json()["error"]["message"]],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
