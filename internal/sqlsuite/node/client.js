// A program in another language, for the tests of this package: it places orders, each once per key, beside Go programs that
// place orders of the same keys.
//
// Standard input: one JSON object {"tenant", "operation", "value", "payload"} per line. Standard output: "ready" once it is
// connected, then per line of input one JSON object {"value", "result", "replayed"} in the order of completion.
'use strict';

const crypto = require('node:crypto');
const readline = require('node:readline');
const { Pool } = require('pg');

// fingerprint is idempotency.fingerprint_of, made here: the payload never has to be sent for it.
function fingerprint(payload) {
  const length = Buffer.alloc(8);
  length.writeBigUInt64BE(BigInt(payload.length));
  const version = Buffer.of(1);
  return Buffer.concat([version, crypto.createHash('sha256').update(version).update(length).update(payload).digest()]);
}

// once runs work in one transaction with the record of its outcome. Whoever asks with the same key and payload gets the same
// bytes, whichever program has done the work.
async function once(pool, key, payload, work) {
  for (let pause = 2; ; pause = Math.min(2 * pause, 50)) {
    const client = await pool.connect();
    let broken = true;
    try {
      await client.query('BEGIN');
      const { rows: [a] } = await client.query(
        'SELECT verdict, state, error_code, result, fence, attempt_token FROM idempotency.acquire($1, $2, $3, $4)',
        [key.tenant, key.operation, key.value, fingerprint(payload)]);
      if (a.verdict === 'RUN') {
        const result = await work(client);
        await client.query('SELECT idempotency.complete($1, $2, $3, $4, $5, $6)',
          [key.tenant, key.operation, key.value, a.fence, a.attempt_token, result]);
        await client.query('COMMIT');
        broken = false;
        return { result, replayed: false };
      }
      await client.query('ROLLBACK'); // at once: an owner cannot complete while we hold the row
      broken = false;
      if (a.verdict === 'REPLAY' && a.state === 'SUCCESS') return { result: a.result, replayed: true };
      if (a.verdict !== 'IN_PROGRESS') throw new Error(a.error_code ?? a.verdict);
    } finally {
      client.release(broken); // a broken one is closed, which rolls back
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

async function main() {
  const pool = new Pool({ connectionString: process.argv[2], max: Number(process.argv[3]) });
  await pool.query('SELECT 1');
  console.log('ready');
  const answers = [];
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const key = JSON.parse(line);
    answers.push(once(pool, key, Buffer.from(key.payload), async (client) => {
      const { rows: [order] } = await client.query(
        "INSERT INTO orders (key, placed_by) VALUES ($1, 'node') RETURNING id", [key.value]);
      return Buffer.from(JSON.stringify({ id: Number(order.id), placed_by: 'node' }));
    }).then(({ result, replayed }) => {
      console.log(JSON.stringify({ value: key.value, result: result.toString(), replayed }));
    }));
  }
  await Promise.all(answers);
  await pool.end();
}

main();
