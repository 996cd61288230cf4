// Sends one request and prints its answer as JSON: node node.mjs URL '{"key": …, "body": …}'. Without a key it is sent plainly.
import { send } from "./client.mjs";

const [url, options] = process.argv.slice(2);
const { key, body, ...others } = JSON.parse(options);
console.log(JSON.stringify(await (key ? send(url, { key, body, ...others }) : plain())));

async function plain() {
	const response = await fetch(url, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
	return { status: response.status, replayed: false, text: await response.text() };
}
