// Asks two policies at once, shows both answers as they come, and sends the vote.

const token = document.body.dataset.token;
const form = document.querySelector("#ask");
const part = (name) => document.querySelector(`#${name}`);
let comparison = null;

async function post(path, fields) {
  return fetch(path, { method: "POST", body: new URLSearchParams({ ...fields, token }), headers: { "X-Part": "main" } });
}

function take(line) {
  if (line.vote) {
    comparison = line.vote;
    part("vote").hidden = false;
  } else {
    part(line.side).textContent += line.text ?? `\n(${line.problem})`;
  }
}

async function readLines(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) take(JSON.parse(line));
  }
}

form?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = form.querySelector("button");
  button.disabled = true;
  for (const name of ["left", "right", "result"]) part(name).textContent = "";
  part("answers").hidden = false;
  part("vote").hidden = true;
  try {
    const answer = await post("/dashboard/compare", Object.fromEntries(new FormData(form)));
    if (answer.ok) await readLines(answer);
    else part("result").textContent = (await answer.json()).message;
  } catch {
    part("result").textContent = "The server did not answer.";
  } finally {
    button.disabled = false;
  }
});

part("vote")?.addEventListener("click", async (event) => {
  const better = event.target.dataset.better;
  if (!better || !comparison) return;
  part("vote").hidden = true;
  const answer = await post("/dashboard/vote", { comparison, better });
  comparison = null;
  part("result").textContent = (await answer.json()).message;
});
