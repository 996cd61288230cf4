// Sends one request and prints its answer as JSON: node node.mjs URL '{"key": …, "body": …}'
import { request } from "./request.mjs";

const [url, options] = process.argv.slice(2);
console.log(JSON.stringify(await request(url, JSON.parse(options))));
