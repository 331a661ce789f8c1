#!/usr/bin/env bash
# mini-swe-agent as the harness: it sends our headers, so its run is an episode, and you send the reward. In the folder of a
# repository, beside a running server: openclaw-rl serve --judge feedback --baseline group
# Its commands run on this machine with your rights, unless you add --environment-class docker or the like.
set -euo pipefail
task=${1:-"add(2, 3) gives -1, not 5."}
session=${2:-mini-1}
server=http://127.0.0.1:30000

test -d ../mini || { python3 -m venv ../mini && ../mini/bin/pip install mini-swe-agent==2.4.6 mcp; }
export OPENAI_API_KEY=none MSWEA_COST_TRACKING=ignore_errors MSWEA_CONFIGURED=true
../mini/bin/mini -y --exit-immediately -l 0 -m openai/smollm2-135m -t "$task" -c mini.yaml \
  -c "model.model_kwargs.api_base=$server/v1" \
  -c "model.model_kwargs.extra_headers={\"X-Session-Id\": \"$session\", \"X-Episode\": \"1\"}"
# Look at what it did, then say what it is worth: here 1, solved.
curl "$server/v1/sessions/$session/reward" -d '{"reward": 1.0, "task": "calc", "solved": true}'
