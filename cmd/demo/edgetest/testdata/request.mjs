import { send } from "./client.mjs";

// request sends one as the tests want it: without a key plainly, and once. What it returns can be written as JSON.
export async function request(url, { key, body, ...others }) {
	if (key) {
		const { status, replayed, retryAfter, text } = await send(url, { key, body, ...others });
		return { status, replayed, retryAfter, text };
	}
	const response = await fetch(url, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
	return { status: response.status, replayed: false, text: await response.text() };
}
