// Calls to the dashboard's server.

export class LoggedOut extends Error {}

async function answer(response) {
  const text = await response.text();
  let said = {};
  try {
    said = JSON.parse(text);
  } catch {
    // A server that is going down may answer with no JSON.
  }
  if (response.status === 401 && !response.url.endsWith("/api/login")) throw new LoggedOut(said.error || "log in");
  if (!response.ok) throw new Error(said.error || `the server answers ${response.status}`);
  return said;
}

export const get = async (path) => answer(await fetch(path));

export const post = async (path, body = {}) =>
  answer(await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }));
