package compensator

// Pause is what Run waits between passes.
var Pause = jittered
